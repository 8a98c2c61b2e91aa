#include "export_store.h"

#include <cerrno>
#include <set>

#include "folder_lock.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

using Names = std::set<std::string>;

// Calls, and passes over what the operating system reports.
template <class Function>
void try_to(const Function& call) {
  try {
    call();
  } catch (const OsError&) {
  }
}

template <class Function>
void exporting(const std::string& path, const Function& call) {
  try {
    call();
  } catch (const OsError& error) {
    throw Error("the model cannot be exported to " + path + ": " + reason_of(error) + "; nothing was changed");
  }
}

std::string data_name(const std::string& path) { return name_of(path) + ".data"; }

// Whether a name is `P.data.<identifier>`.
bool is_staged(const std::string& path, const std::string& name) {
  const std::string start = data_name(path) + ".";
  return starts_with(name, start) && is_hexadecimal(name.substr(start.size()), 16);
}

// The names of the data files of ours that the present model refers to.
Names data_names(const std::string& path) {
  Names made;
  try {
    const ModelFile present = read_model(OpenFile(path).read_all());
    for (const auto& item : present.external) {
      const std::string& name = item.second.location;
      if (name == data_name(path) || is_staged(path, name)) made.insert(name);
    }
  } catch (const OsError& error) {
    if (error.code != ENOENT) throw;
  } catch (const ModelError&) {
    return {};
  }
  return made;
}

// The file that is there while data of ours lose their model. If the process dies before it has removed
// them, the next one knows by it whose they are.
std::string announcement(const std::string& path) { return beside(path, "." + name_of(path) + ".replaced"); }

// Removes data that no model refers to any more.
void remove_data(const std::string& path, const Names& names) {
  const auto remove = [&](const std::string& file) {
    try_to([&] {
      if (!exists_as_link(file)) return;
      remove_file(file);
      sync_folder(folder_of(path));
    });
  };
  for (const std::string& name : names) remove(beside(path, name));
  remove(announcement(path));
}

// The names of data files that are no leftovers. If the model goes on with another name of its data,
// `P.data` is a leftover itself.
Names in_use(const std::string& path) {
  const Names used = data_names(path);
  if (!used.empty() || exists(announcement(path))) {
    const bool is_used = used.count(data_name(path)) > 0;
    remove_data(path, is_used ? Names() : Names{data_name(path)});
  }
  return used;
}

// Calls with the names of data that the new model will replace, which it announces.
void replacing(const std::string& path, const std::function<void(const Names&)>& call) {
  const Names replaced = data_names(path);
  try_to([&] {  // on a full disk, data may stay behind
    if (replaced.empty()) return;
    if (!exists(announcement(path))) NewFile touched(announcement(path));
    sync_folder(folder_of(path));
  });
  try {
    call(replaced);
  } catch (...) {
    remove_data(path, {});
    throw;
  }
}

void rename_durably(const std::string& from, const std::string& to) {
  rename_file(from, to);
  try_to([&] { sync_folder(folder_of(to)); });  // it has been made, so that no error may speak against it
}

// Files in the making beside a model.
class ModelFiles : public NewFiles {
 public:
  explicit ModelFiles(const std::string& path) : ModelFiles(path, std::make_shared<Names>()) {}

 private:
  ModelFiles(const std::string& path, const std::shared_ptr<Names>& used)
      : NewFiles(
            folder_of(path),
            [=](const std::string& name) {
              const bool is_ours = is_temporary_for(name_of(path), name) || is_temporary_for(data_name(path), name) ||
                                   is_staged(path, name);
              return is_ours && used->count(name) == 0;
            },
            [=] { *used = in_use(path); }) {}
};

}  // namespace

void require_writable(const std::string& path) {
  if (is_folder(path) || name_of(path).empty()) {
    throw Error("the model cannot be exported to " + path + ", which is a directory");
  }
  if (is_folder(folder_of(path))) return;
  throw Error("the model cannot be exported to " + path + ": there is no directory " + folder_of(path) +
              "; create it first");
}

void store_model(const std::string& path, const Chunks& model) {
  const std::string temporary = temporary_for(path, random_digits(8));
  exporting(path, [&] {
    ModelFiles files(path);
    files.write(temporary, [&](NewFile& file) { model.write(file); }, path);
    files.commit([&] {
      replacing(path, [&](const Names& replaced) {
        rename_durably(temporary, path);
        remove_data(path, replaced);
      });
    });
  });
}

void store_with_data(const std::string& path, const std::function<Chunks(const std::string&)>& model,
                     const Chunks& data) {
  const std::string final = beside(path, data_name(path)), staged = final + "." + random_digits(8);
  const std::string first = temporary_for(path, random_digits(8)), second = temporary_for(path, random_digits(8));
  const std::string copy = temporary_for(final, random_digits(8));
  exporting(path, [&] {
    ModelFiles files(path);
    const auto write = [&](const std::string& target, const Chunks& content, const std::string& successor_of) {
      files.write(target, [&](NewFile& file) { content.write(file); }, successor_of);
    };
    write(staged, data, final);
    write(first, model(name_of(staged)), path);
    bool has_copy = true;
    try {
      write(copy, data, final);
      write(second, model(name_of(final)), path);
    } catch (const OsError&) {
      has_copy = false;  // the disk is full: the new model goes on with the other name of its data
    }
    files.commit([&] {
      replacing(path, [&](const Names& replaced) {
        sync_folder(folder_of(path));  // the data have their name before the model that refers to it
        files.keep(staged);            // from the next rename on, it is in use
        try {
          rename_durably(first, path);
        } catch (...) {
          if (exists(first)) try_to([&] { remove_file(staged); });
          throw;
        }
        try_to([&] {
          remove_data(path, replaced);
          if (!has_copy) return;
          rename_durably(copy, final);
          rename_durably(second, path);
          remove_file(staged);
        });
      });
    });
  });
}

}  // namespace onnxtrain::device
