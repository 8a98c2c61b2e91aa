// Files and folders of the operating system.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "bytes.h"
#include "errors.h"

namespace onnxtrain::device {

// ---- paths ----

std::string tidy_path(std::string_view path);  // without "./" and doubled slashes
std::string name_of(const std::string& path);
std::string folder_of(const std::string& path);  // "." for a name alone
std::string beside(const std::string& path, const std::string& name);

bool is_folder(const std::string& path);
bool is_file(const std::string& path);
bool exists(const std::string& path);
bool is_same_file(const std::string& path, const std::string& other);  // by two names, or one
bool exists_as_link(const std::string& path);                          // a link that leads nowhere, too

// ---- reading ----

// A regular file that is open for reading. Nothing is mapped: a process that touches mapped memory of
// a file that another process has made shorter is killed by the system. Raises OsError.
class OpenFile {
 public:
  explicit OpenFile(const std::string& path);
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  void read_into(uint8_t* memory, uint64_t size, uint64_t offset) const;
  std::string read(uint64_t offset, uint64_t size) const;
  std::string last_bytes(uint64_t size) const;  // fewer if there are not so many
  Bytes read_all() const;

  const std::string path;
  uint64_t size = 0;

 private:
  int descriptor_ = -1;
};

// Refuses a file that a link leads to out of the folder of the file that names it. The owner may be
// a link itself, with all that belongs to it in the folder of its target.
void require_beside(const std::string& path, const std::string& owner);

// ---- writing ----

// A new file that is open for writing, and locked while its owner lives. Raises OsError.
class NewFile {
 public:
  explicit NewFile(const std::string& path);
  ~NewFile() { close(); }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, size_t size);
  void write(std::string_view data) { write(data.data(), data.size()); }
  void sync();
  void close();

 private:
  int descriptor_ = -1;
  std::string waiting_;  // small parts are written together
  void flush();
};

using Write = std::function<void(NewFile&)>;

void rename_file(const std::string& from, const std::string& to);
void remove_file(const std::string& path);                     // no error if there is none
void remove_tree(const std::string& path);                     // a folder with all in it; errors are passed over
void sync_folder(const std::string& folder);                   // makes renames durable, if the system can
std::vector<std::string> names_in(const std::string& folder);  // none where that cannot be known

// ---- errors ----

// The reason that the operating system reports, as messages have it.
std::string reason_of(const OsError& error);

// Calls, and turns an OsError into a sentence: "cannot read FILE: …".
template <class Function>
auto translated(const char* action, const std::string& path, const Function& call) {
  try {
    return call();
  } catch (const OsError& error) {
    throw UnreadableError(std::string("cannot ") + action + " " + path + ": " + reason_of(error));
  }
}

}  // namespace onnxtrain::device
