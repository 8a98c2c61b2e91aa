#include "files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace onnxtrain::device {

namespace {

constexpr uint64_t kChunk = 1 << 26;
constexpr size_t kTogether = 1 << 16;

[[noreturn]] void fail() { throw OsError(errno); }

void require_regular(const struct stat& found) {
  if (S_ISREG(found.st_mode)) return;
  throw OsError(0, S_ISDIR(found.st_mode) ? "it is a directory" : "it is not a regular file");
}

std::string real_path(const std::string& path) {
  char* found = realpath(path.c_str(), nullptr);
  if (found == nullptr) return path;
  std::string made = found;
  std::free(found);
  return made;
}

bool is_within(const std::string& path, const std::string& folder) {
  const std::string start = folder == "/" ? folder : folder + "/";
  return path == folder || path.compare(0, start.size(), start) == 0;
}

}  // namespace

OsError::OsError(int code) : OsError(code, std::strerror(code)) {}

std::string reason_of(const OsError& error) {
  const bool is_full = error.code == ENOSPC || error.code == EDQUOT || error.code == EFBIG;
  return std::string(error.what()) + (is_full ? " (the disk is full, or a limit on file sizes is reached)" : "");
}

std::string tidy_path(std::string_view path) {
  std::string tidy;
  for (size_t at = 0; at < path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    const std::string_view part = path.substr(at, end - at);
    if (at == 0 && end == 0) tidy = "/";
    if (!part.empty() && part != ".") {
      if (!tidy.empty() && tidy.back() != '/') tidy += '/';
      tidy += part;
    }
    at = end + 1;
  }
  return tidy.empty() && !path.empty() ? "." : tidy;
}

std::string name_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == path.npos ? path : path.substr(slash + 1);
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == path.npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string beside(const std::string& path, const std::string& name) {
  const size_t slash = path.rfind('/');
  return slash == path.npos ? name : path.substr(0, slash + 1) + name;
}

bool is_folder(const std::string& path) {
  struct stat found;
  return stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

bool is_file(const std::string& path) {
  struct stat found;
  return stat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode);
}

bool exists(const std::string& path) {
  struct stat found;
  return stat(path.c_str(), &found) == 0;
}

bool is_same_file(const std::string& path, const std::string& other) {
  struct stat a, b;
  return stat(path.c_str(), &a) == 0 && stat(other.c_str(), &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

bool exists_as_link(const std::string& path) {
  struct stat found;
  return lstat(path.c_str(), &found) == 0;
}

OpenFile::OpenFile(const std::string& path) : path(path) {
  struct stat found;
  // Before it is opened: opening a pipe would wait for its other end.
  if (stat(path.c_str(), &found) != 0) fail();
  require_regular(found);
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0) fail();
  try {
    if (fstat(descriptor_, &found) != 0) fail();
    require_regular(found);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
  size = static_cast<uint64_t>(found.st_size);
}

OpenFile::~OpenFile() { ::close(descriptor_); }

void OpenFile::read_into(uint8_t* memory, uint64_t length, uint64_t offset) const {
  for (uint64_t filled = 0; filled < length;) {
    const auto part = static_cast<size_t>(std::min(length - filled, kChunk));
    const ssize_t count = pread(descriptor_, memory + filled, part, static_cast<off_t>(offset + filled));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail();
    if (count == 0) throw OsError(EIO, "the file became shorter while it was read");
    filled += static_cast<uint64_t>(count);
  }
}

std::string OpenFile::read(uint64_t offset, uint64_t length) const {
  std::string made(static_cast<size_t>(length), '\0');
  read_into(reinterpret_cast<uint8_t*>(made.data()), length, offset);
  return made;
}

std::string OpenFile::last_bytes(uint64_t length) const {
  length = std::min(length, size);
  return read(size - length, length);
}

Bytes OpenFile::read_all() const {
  Bytes made = allocate(size);
  read_into(made.data, size, 0);
  return made;
}

void require_beside(const std::string& path, const std::string& owner) {
  const std::string target = real_path(path);
  if (is_within(target, real_path(folder_of(owner))) || is_within(target, folder_of(real_path(owner)))) return;
  throw OsError(0, "it is a link to " + target + ", outside the folder");
}

NewFile::NewFile(const std::string& path) {
  descriptor_ = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail();
  flock(descriptor_, LOCK_EX | LOCK_NB);  // others see that its owner lives
}

void NewFile::write(const void* data, size_t size) {
  if (size < kTogether) {
    waiting_.append(static_cast<const char*>(data), size);
    if (waiting_.size() >= kTogether) flush();
    return;
  }
  flush();
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count = ::write(descriptor_, bytes, std::min<size_t>(size, kChunk));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail();
    bytes += count;
    size -= static_cast<size_t>(count);
  }
}

void NewFile::flush() {
  for (size_t done = 0; done < waiting_.size();) {
    const ssize_t count = ::write(descriptor_, waiting_.data() + done, waiting_.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail();
    done += static_cast<size_t>(count);
  }
  waiting_.clear();
}

void NewFile::sync() {
  flush();
  if (fsync(descriptor_) != 0) fail();
}

void NewFile::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

void rename_file(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) fail();
}

void remove_file(const std::string& path) {
  if (unlink(path.c_str()) != 0 && errno != ENOENT) fail();
}

void remove_tree(const std::string& path) {
  struct stat found;
  if (lstat(path.c_str(), &found) != 0) return;
  if (!S_ISDIR(found.st_mode)) {
    unlink(path.c_str());
    return;
  }
  for (const std::string& name : names_in(path)) remove_tree(path + "/" + name);
  rmdir(path.c_str());
}

void sync_folder(const std::string& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail();
  fsync(descriptor);  // some file systems cannot sync folders
  ::close(descriptor);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  DIR* open = opendir(folder.c_str());
  if (open == nullptr) return names;
  while (const dirent* entry = readdir(open)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  closedir(open);
  return names;
}

}  // namespace onnxtrain::device
