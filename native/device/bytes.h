// Bytes in memory that several objects share, and their checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace onnxtrain::device {

// Bytes, and what owns them.
struct Bytes {
  std::shared_ptr<uint8_t> memory;
  uint8_t* data = nullptr;
  uint64_t size = 0;

  Bytes part(uint64_t offset, uint64_t length) const { return {memory, data + offset, length}; }
  std::string_view view() const { return {reinterpret_cast<const char*>(data), static_cast<size_t>(size)}; }
};

constexpr uint64_t kAlignment = 64;  // of large tensors in files, and of memory; a cache line

// Memory that begins at a multiple of 64 bytes; its content is arbitrary. An OsError if there is none.
Bytes allocate(uint64_t size);

// The same, all zero; its pages are not touched before they are used.
Bytes allocate_zeros(uint64_t size);

// The bytes of all memory that was allocated so and is held now, and the most that there were.
struct HeldMemory {
  uint64_t held, most;
};
HeldMemory held_memory();

// The CRC-32 of gzip, continued from that of the bytes before.
uint32_t crc32(const void* data, size_t size, uint32_t before = 0);
inline uint32_t crc32(std::string_view data, uint32_t before = 0) { return crc32(data.data(), data.size(), before); }

// Numbers of files are little-endian, and so are all processors that onnxruntime runs on.
template <class T>
T number_at(const uint8_t* data) {
  T number;
  __builtin_memcpy(&number, data, sizeof number);
  return number;
}

}  // namespace onnxtrain::device
