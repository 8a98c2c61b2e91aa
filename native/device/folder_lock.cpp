#include "folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <ctime>
#include <thread>

#include "json.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

// Locks are held for a few renames. A process that holds one for longer is stopped, or its disk is.
constexpr int kWaitSeconds = 30;
constexpr auto kPause = std::chrono::milliseconds(5);
constexpr std::time_t kStaleSeconds = 3600;  // without locks, what is older has no owner
constexpr const char* kCommitted = ".onnxtrain-generation";
constexpr std::string_view kScratch = ".onnxtrain-";

bool is_old(const std::string& path) {
  struct stat found;
  return lstat(path.c_str(), &found) == 0 && std::time(nullptr) - found.st_mtime > kStaleSeconds;
}

// Whether the owner of a file is dead, or the file is old where that cannot be known.
bool is_abandoned(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor < 0) return errno == ENOENT || is_old(path);
  const bool is_free = flock(descriptor, LOCK_EX | LOCK_NB) == 0;
  const bool has_owner = !is_free && errno == EWOULDBLOCK;
  close(descriptor);
  return is_free || (!has_owner && is_old(path));
}

bool is_scratch_name(const std::string& name) {
  if (!starts_with(name, kScratch)) return false;
  const std::string rest = name.substr(kScratch.size());
  const bool is_short =
      rest.size() == 8 && rest.find_first_not_of("0123456789abcdefghijklmnopqrstuvwxyz_") == rest.npos;
  return is_short || is_hexadecimal(rest, 16);
}

bool is_real_folder(const std::string& path) {
  struct stat found;
  return lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

// Removes the scratch folders of dead processes; the caller holds the lock of the folder.
void remove_scratch(const std::string& folder, bool has_locks) {
  for (const std::string& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    if (!is_scratch_name(name) || !is_real_folder(path)) continue;
    if (has_locks ? is_abandoned(path + "/owner") : is_old(path)) remove_tree(path);
  }
}

// Whether a name may be in the list of a committed folder. Any other is not from us, and could be
// that of any file.
bool is_artifact_name(const std::string& name) {
  if (name.find_first_of(std::string("/\\\0", 3)) != name.npos) return false;
  for (const char* end :
       {"checkpoint", "checkpoint.data", "nominal_checkpoint", "inference_model.onnx", "base.data", ".data.old"}) {
    if (ends_with(name, end)) return true;
  }
  for (const char* graph : {"training_model", "eval_model", "optimizer_model", "step_model"}) {
    for (const char* end : {".onnx", ".ort", ".required_operators.config"}) {
      if (ends_with(name, std::string(graph) + end)) return true;
    }
  }
  const size_t digits = 16;
  return name.size() >= digits + 6 && name.compare(name.size() - digits - 6, 6, ".data.") == 0 &&
         is_hexadecimal(std::string_view(name).substr(name.size() - digits), digits);
}

bool read_list(const std::string& text, std::vector<std::string>& present, std::vector<std::string>& absent) {
  Json listed;
  if (!parse_json(text, Numbers::kPlain, listed)) return false;
  const Json *files = listed.find("files"), *remove = listed.find("remove");
  if (files == nullptr || remove == nullptr || !files->as_texts(present) || !remove->as_texts(absent)) return false;
  for (const auto* names : {&present, &absent}) {
    for (const std::string& name : *names) {
      if (!is_artifact_name(name)) return false;
    }
  }
  return true;
}

// Moves the files of a committed folder into place, if there is one, from any point on.
void finish_moves(const std::string& folder) {
  const std::string committed = folder + "/" + kCommitted, list = committed + "/files.json";
  if (!exists_as_link(committed)) return;
  if (!is_real_folder(committed)) throw ModelError(committed + " is not a folder, as it should be: delete it");
  std::vector<std::string> present, absent;
  // Without the list, all was in place when it was removed.
  if (exists_as_link(list)) {
    const OpenFile file(list);
    if (!read_list(file.read(0, file.size), present, absent)) {
      throw ModelError("the list of files in " + committed +
                       " is damaged: delete this folder, and write the artifacts anew");
    }
  }
  for (const std::string& name : present) {
    if (exists_as_link(committed + "/" + name)) rename_file(committed + "/" + name, folder + "/" + name);
  }
  for (const std::string& name : absent) remove_file(folder + "/" + name);
  sync_folder(committed);
  sync_folder(folder);
  remove_file(list);
  remove_tree(committed);
  sync_folder(folder);
}

}  // namespace

FolderLock::FolderLock(const std::string& folder, Kind kind) {
  descriptor_ = open(folder.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0 && errno == EACCES) return;  // it may be written and not be listed
  if (descriptor_ < 0) throw OsError(errno);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kWaitSeconds);
  while (flock(descriptor_, (kind == kShared ? LOCK_SH : LOCK_EX) | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EACCES && errno != EDEADLK && errno != EINTR) return;
    if (std::chrono::steady_clock::now() > end) {
      close(descriptor_);
      throw OsError(ETIMEDOUT, "another process has kept the folder " + quoted(folder) + " locked for " +
                                   std::to_string(kWaitSeconds) +
                                   " seconds; it may be stopped: let it go on, or end it");
    }
    std::this_thread::sleep_for(kPause);
  }
  is_held_ = true;
}

FolderLock::~FolderLock() {
  if (is_held_) flock(descriptor_, LOCK_UN);  // a child process may have inherited the descriptor
  if (descriptor_ >= 0) close(descriptor_);
}

Changing::Changing(const std::string& folder) : lock_(folder, FolderLock::kExclusive) { finish_moves(folder); }

void settle(const std::string& folder) {
  if (!exists_as_link(folder + "/" + kCommitted)) return;
  try {
    Changing completed(folder);
  } catch (const OsError& error) {
    throw ModelError("a process ended while it replaced the files in " + quoted(folder) +
                     ", and the rest cannot be done now (" + error.what() +
                     "): open the folder once with a program that may write there");
  }
}

std::string temporary_for(const std::string& path, const std::string& identifier) {
  return beside(path, "." + name_of(path) + "." + identifier + ".tmp");
}

bool is_temporary_for(const std::string& name, const std::string& found) {
  const std::string start = "." + name + ".";
  return starts_with(found, start) && ends_with(found, ".tmp") && found.size() == start.size() + 16 + 4 &&
         is_hexadecimal(std::string_view(found).substr(start.size(), 16), 16);
}

NewFiles::NewFiles(const std::string& folder, const std::function<bool(const std::string&)>& is_leftover,
                   const std::function<void()>& before_writing)
    : folder_(folder) {
  const Changing changing(folder);
  before_writing();
  remove_scratch(folder, changing.has_locks());
  for (const std::string& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    struct stat found;
    if (!is_leftover(name) || lstat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) continue;
    if (changing.has_locks() ? is_abandoned(path) : is_old(path)) unlink(path.c_str());
  }
}

void NewFiles::write(const std::string& path, const Write& write, const std::string& successor_of) {
  {
    const Changing changing(folder_);
    open_[path] = std::make_unique<NewFile>(path);
  }
  struct stat earlier;  // the new file gets the permissions of the old one
  if (stat(successor_of.c_str(), &earlier) == 0 && chmod(path.c_str(), earlier.st_mode & 07777) != 0) errno = 0;
  write(*open_[path]);
  open_[path]->sync();
}

void NewFiles::commit(const std::function<void()>& rename) {
  const Changing changing(folder_);
  for (auto& file : open_) file.second->close();
  rename();
}

NewFiles::~NewFiles() {
  for (auto& [path, file] : open_) {
    file->close();
    unlink(path.c_str());
  }
}

void replace_file(const std::string& path, const Write& write) {
  const std::string temporary = temporary_for(path, random_digits(8)), name = name_of(path);
  NewFiles files(folder_of(path), [&](const std::string& found) { return is_temporary_for(name, found); }, [] {});
  files.write(temporary, write, path);
  files.commit([&] {
    rename_file(temporary, path);
    sync_folder(folder_of(path));
  });
}

}  // namespace onnxtrain::device
