#include "checkpoint_store.h"

#include <cerrno>

#include "checksums.h"
#include "folder_lock.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

// What a data file of ours ends with, which has its identifier; "" for others.
std::string mark_of(const std::string& path) {
  try {
    const std::string last = OpenFile(path).last_bytes(kFooterSize);
    return last.size() == kFooterSize && starts_with(last, footer_of("")) ? last : "";
  } catch (const OsError&) {
    return "";
  }
}

// Completes or undoes a save that was interrupted between renames.
void complete(const std::string& path, const std::string& live_identifier) {
  const std::string final = data_path(path), old = data_path(path, ".old");
  const std::string wanted = live_identifier.empty() ? "" : footer_of(live_identifier);
  if (!wanted.empty() && mark_of(final) != wanted) {
    for (const std::string& candidate : {data_path(path, "." + live_identifier), old}) {
      if (mark_of(candidate) != wanted) continue;
      rename_file(candidate, final);
      break;
    }
  }
  if (exists(old) && !exists(final)) {
    rename_file(old, final);
  } else if (exists(old) && !wanted.empty() && mark_of(final) == wanted) {
    sync_folder(folder_of(path));
    remove_file(old);
  }
}

// Brings the old files back after an error before the new ones are valid.
void undo(const std::string& temporary, const std::string& staged, const std::string& path, bool is_aside) {
  if (!exists(temporary)) return;  // the rename was done
  const std::string old = data_path(path, ".old");
  if (is_aside && exists(old)) rename_file(old, data_path(path));
  if (!staged.empty()) remove_file(staged);
}

// Renames the new files into place; an error before the first is leaves the old ones.
void exchange(const std::string& path, const std::string& temporary, const std::string& staged) {
  const std::string final = data_path(path), folder = folder_of(path);
  bool is_aside = false;
  try {
    if (!staged.empty()) {
      if (exists(final)) {
        is_aside = true;
        rename_file(final, data_path(path, ".old"));
      }
      sync_folder(folder);
    }
    rename_file(temporary, path);
  } catch (...) {
    undo(temporary, staged, path, is_aside);
    throw;
  }
  sync_folder(folder);
  if (!staged.empty()) {
    rename_file(staged, final);
    sync_folder(folder);
  } else if (!mark_of(final).empty()) {
    remove_file(final);
  }
  remove_file(data_path(path, ".old"));
}

}  // namespace

std::string data_path(const std::string& path, const std::string& suffix) { return path + ".data" + suffix; }

std::unique_ptr<OpenFile> open_checkpoint(const std::string& path) {
  if (is_folder(path)) {
    throw CheckpointError(path +
                          " is a directory; checkpoints of ONNX Runtime before 1.16, which were directories, cannot "
                          "be read");
  }
  settle(folder_of(path));
  return translated("read", path, [&] { return std::make_unique<OpenFile>(path); });
}

std::unique_ptr<OpenFile> open_data(const std::string& path, const std::string& identifier, bool may_be_unmarked) {
  const std::string final = data_path(path);
  std::vector<std::string> candidates = {final};
  if (!identifier.empty()) candidates.push_back(data_path(path, "." + identifier));
  candidates.push_back(data_path(path, ".old"));
  std::unique_ptr<OpenFile> unmarked;
  for (const std::string& candidate : candidates) {
    std::unique_ptr<OpenFile> file;
    try {
      file = std::make_unique<OpenFile>(candidate);
    } catch (const OsError& error) {
      if (error.code == ENOENT) continue;
      throw CheckpointError("cannot read " + candidate + ": " + reason_of(error));
    }
    const std::string mark = translated("read", candidate, [&] { return file->last_bytes(kFooterSize); });
    if (!identifier.empty() && mark == footer_of(identifier)) return file;
    if (unmarked == nullptr && !starts_with(mark, footer_of(""))) unmarked = std::move(file);
  }
  if (unmarked != nullptr && may_be_unmarked) return unmarked;
  if (unmarked != nullptr) throw CheckpointDataError(unmarked->path + " is damaged: it has lost its end");
  if (exists(final)) throw CheckpointDataError(final + " belongs to another checkpoint than " + path);
  throw CheckpointDataError(path + " has external data, but " + final + " does not exist");
}

void store_checkpoint(const std::string& path, const Write& main, const Write& data, const std::string& identifier,
                      const std::function<std::string()>& live_identifier) {
  const std::string name = name_of(path), temporary = temporary_for(path, identifier);
  const std::string staged = data ? data_path(path, "." + identifier) : "";
  const auto is_leftover = [&](const std::string& found) {
    const std::string start = name + ".data.";
    const bool is_staged = starts_with(found, start) && is_hexadecimal(found.substr(start.size()), 16);
    return is_staged || is_temporary_for(name, found);
  };
  const auto complete_interrupted = [&] { complete(path, live_identifier()); };
  translated("write", path, [&] {
    NewFiles files(folder_of(path), is_leftover, complete_interrupted);
    if (data) files.write(staged, data, data_path(path));
    files.write(temporary, main, path);
    files.commit([&] {
      complete_interrupted();
      if (data) files.keep(staged);  // from the next rename on, it may be in use
      exchange(path, temporary, staged);
    });
  });
}

}  // namespace onnxtrain::device
