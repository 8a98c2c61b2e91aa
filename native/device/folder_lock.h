// Writers of a folder take turns, and files replace others so that a crash leaves the old or the new.
//
// A folder is locked by its own descriptor (flock); the system releases the lock when its process
// ends, however it ends. Who holds it finds no half-finished change: what a killed process had
// committed is completed first. New files are written beside their places under temporary names,
// and stay open, so that other processes leave them alone while their owner lives. Whoever writes
// next removes what dead processes left behind. docs/format.md describes it all.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "files.h"

namespace onnxtrain::device {

// The lock of a folder. On file systems without locks, writers do not take turns.
class FolderLock {
 public:
  enum Kind { kShared, kExclusive };
  FolderLock(const std::string& folder, Kind kind);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  bool is_held() const { return is_held_; }

 private:
  int descriptor_ = -1;
  bool is_held_ = false;
};

// An exclusive lock, and no half-finished change in the folder.
class Changing {
 public:
  explicit Changing(const std::string& folder);
  bool has_locks() const { return lock_.is_held(); }

 private:
  FolderLock lock_;
};

// Completes a change of a folder that a killed process had committed.
void settle(const std::string& folder);

// A new temporary name beside a file.
std::string temporary_for(const std::string& path, const std::string& identifier);

// Files in the making, in the folder that they will appear in.
class NewFiles {
 public:
  // `is_leftover` tells which names dead processes may have left; `before_writing` is called first.
  NewFiles(const std::string& folder, const std::function<bool(const std::string&)>& is_leftover,
           const std::function<void()>& before_writing);
  ~NewFiles();

  // Writes a new file that will replace another, and waits until it is on the disk.
  void write(const std::string& path, const Write& write, const std::string& successor_of);
  // Calls `rename` while no other process changes the names in the folder.
  void commit(const std::function<void()>& rename);
  // Lets a file stay under the name that it was written to.
  void keep(const std::string& path) { open_.erase(path); }

 private:
  std::string folder_;
  std::map<std::string, std::unique_ptr<NewFile>> open_;
};

// Whether a name is that of a temporary file for `name`.
bool is_temporary_for(const std::string& name, const std::string& found);

// Replaces one file.
void replace_file(const std::string& path, const Write& write);

}  // namespace onnxtrain::device
