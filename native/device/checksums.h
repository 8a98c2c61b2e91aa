// Checksums of the two files of a checkpoint; docs/format.md specifies them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bytes.h"
#include "files.h"

namespace onnxtrain::device {

constexpr size_t kFrontSize = 24;  // of what the front of a file says about its length
constexpr size_t kFrontAt = 8;
constexpr size_t kEndSize = 16;     // of the checksum at the end
constexpr size_t kFooterSize = 24;  // of what links a data file to its checkpoint

// Whether it is a mark, even if half of its bytes are damaged.
bool is_mark(std::string_view found, std::string_view mark);

// Bytes 8 to 32 of a file that has `length` bytes with its checksum.
std::string front_of(uint64_t length, uint64_t structure);

// The last bytes of a file.
std::string end_of(uint32_t crc);

// How many bytes come before the tensors, from the first 32; all if it is not said.
uint64_t structure_size(std::string_view start);

// Checks length and checksum. Returns what is wrong, or ""; and whether the front announces them.
// Files of ONNX Runtime have neither, those of older versions of onnxtrain only the checksum.
std::string check_file(std::string_view data, bool& is_announced);

// The last bytes of a data file.
std::string footer_of(const std::string& identifier);

// Writes the elements of a data file, and the checksums of its blocks behind them.
class BlockWriter {
 public:
  explicit BlockWriter(NewFile& file) : file_(file) {}
  void write(const void* data, size_t size);
  void finish();

 private:
  NewFile& file_;
  std::vector<uint32_t> sums_;
  uint64_t written_ = 0;
};

// A block of external data that its checksum does not match: bytes `start` to `stop`.
struct DamagedBlock {
  uint64_t start, stop;
};

// External data that cannot be right, and why.
struct DamagedData {
  std::string what;
};

// The data, of so many bytes, of a file with checksums before the position `end`.
Bytes read_checked(const OpenFile& file, uint64_t end, uint64_t length);

}  // namespace onnxtrain::device
