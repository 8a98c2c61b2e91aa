#include "bytes.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "errors.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

// Tables for eight bytes at a time: entry k has the checksums of a byte that k zeros follow.
struct CrcTables {
  std::array<std::array<uint32_t, 256>, 8> of;

  CrcTables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320u : 0);
      of[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (size_t k = 1; k < 8; ++k) of[k][byte] = (of[k - 1][byte] >> 8) ^ of[0][of[k - 1][byte] & 0xFF];
    }
  }
};

std::atomic<uint64_t> held_bytes{0}, most_bytes{0};

void count(uint64_t size) {
  const uint64_t now = held_bytes.fetch_add(size) + size;
  uint64_t most = most_bytes.load();
  while (most < now && !most_bytes.compare_exchange_weak(most, now)) {
  }
}

Bytes obtained(uint64_t size, bool zero) {
  const uint64_t room = size + kAlignment;
  void* memory = nullptr;
  if (room >= size && room <= SIZE_MAX / 2) memory = zero ? std::calloc(1, room) : std::malloc(room);
  if (memory == nullptr) throw OsError(ENOMEM, "it needs " + with_commas(size) + " bytes of memory");
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t start = (address + kAlignment - 1) / kAlignment * kAlignment;
  auto* bytes = static_cast<uint8_t*>(memory);
  const auto release = [room](uint8_t* last) {
    held_bytes -= room;
    std::free(last);
  };
  count(room);
  return {std::shared_ptr<uint8_t>(bytes, release), bytes + (start - address), size};
}

}  // namespace

Bytes allocate(uint64_t size) { return obtained(size, false); }
Bytes allocate_zeros(uint64_t size) { return obtained(size, true); }
HeldMemory held_memory() { return {held_bytes.load(), most_bytes.load()}; }

uint32_t crc32(const void* data, size_t size, uint32_t before) {
  static const CrcTables tables;
  const auto& of = tables.of;
  const auto* byte = static_cast<const uint8_t*>(data);
  uint32_t crc = ~before;
  for (; size >= 8; size -= 8, byte += 8) {
    const uint32_t low = number_at<uint32_t>(byte) ^ crc;
    const auto high = number_at<uint32_t>(byte + 4);
    crc = of[7][low & 0xFF] ^ of[6][(low >> 8) & 0xFF] ^ of[5][(low >> 16) & 0xFF] ^ of[4][low >> 24] ^
          of[3][high & 0xFF] ^ of[2][(high >> 8) & 0xFF] ^ of[1][(high >> 16) & 0xFF] ^ of[0][high >> 24];
  }
  for (; size > 0; --size, ++byte) crc = (crc >> 8) ^ of[0][(crc ^ *byte) & 0xFF];
  return ~crc;
}

}  // namespace onnxtrain::device
