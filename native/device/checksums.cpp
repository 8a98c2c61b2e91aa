#include "checksums.h"

#include <algorithm>
#include <cstring>

namespace onnxtrain::device {

namespace {

constexpr std::string_view kFrontMark = "ODTCSIZE", kEndMark = "ODTCCRC=", kTableMark = "ODTCBLKS",
                           kFooterMark = "ODTCDATA";
constexpr uint64_t kBlockSize = 1 << 20;
constexpr uint32_t kSmallestBlock = 1 << 16;  // many small blocks would keep a reader busy
constexpr size_t kTableSize = 24;

template <class T>
void append(std::string& text, T number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// What follows the checksums of blocks: mark, length of the data, size of a block, CRC-32 of all.
std::string table_of(std::string_view sums, uint64_t length, uint32_t block) {
  std::string fields(kTableMark);
  append(fields, length);
  append(fields, block);
  append(fields, crc32(fields, crc32(sums)));
  return fields;
}

std::string padded_start(std::string_view data) {
  std::string start(data.substr(0, kFrontAt + kFrontSize));
  start.resize(kFrontAt + kFrontSize, '\0');
  return start;
}

uint64_t number_in(const std::string& text, size_t at) {
  return number_at<uint64_t>(reinterpret_cast<const uint8_t*>(text.data()) + at);
}

}  // namespace

bool is_mark(std::string_view found, std::string_view mark) {
  size_t same = 0;
  for (size_t i = 0; i < std::min(found.size(), mark.size()); ++i) same += found[i] == mark[i];
  return 2 * same >= mark.size();
}

std::string front_of(uint64_t length, uint64_t structure) {
  std::string front(kFrontMark);
  append(front, length);
  append(front, structure);
  return front;
}

std::string end_of(uint32_t crc) {
  std::string end(kEndMark);
  for (int shift = 28; shift >= 0; shift -= 4) end += "0123456789abcdef"[(crc >> shift) & 15];
  return end;
}

uint64_t structure_size(std::string_view data) {
  const std::string start = padded_start(data);
  return start.compare(kFrontAt, kFrontMark.size(), kFrontMark) == 0 ? number_in(start, kFrontAt + 16) : UINT64_MAX;
}

std::string check_file(std::string_view data, bool& is_announced) {
  const std::string start = padded_start(data);
  is_announced = is_mark(std::string_view(start).substr(kFrontAt, kFrontMark.size()), kFrontMark);
  const uint64_t length = number_in(start, kFrontAt + 8);
  if (is_announced && length != data.size()) {
    return "the file has " + std::to_string(data.size()) + " bytes instead of " + std::to_string(length) +
           ": it is cut off or damaged";
  }
  const size_t rest = data.size() < kEndSize ? 0 : data.size() - kEndSize;
  const std::string_view last = data.substr(rest);
  if (!is_announced && !is_mark(last, kEndMark)) return "";
  if (last != end_of(crc32(data.substr(0, rest)))) return "the checksum does not match: the file is damaged";
  return "";
}

std::string footer_of(const std::string& identifier) { return std::string(kFooterMark) + identifier; }

void BlockWriter::write(const void* data, size_t size) {
  file_.write(data, size);
  const auto* bytes = static_cast<const uint8_t*>(data);
  while (size > 0) {
    const auto block = static_cast<size_t>(written_ / kBlockSize);
    const auto part = static_cast<size_t>(std::min<uint64_t>(size, kBlockSize - written_ % kBlockSize));
    if (block == sums_.size()) sums_.push_back(0);
    sums_[block] = crc32(bytes, part, sums_[block]);
    bytes += part;
    size -= part;
    written_ += part;
  }
}

void BlockWriter::finish() {
  std::string sums;
  for (const uint32_t sum : sums_) append(sums, sum);
  file_.write(sums + table_of(sums, written_, static_cast<uint32_t>(kBlockSize)));
}

Bytes read_checked(const OpenFile& file, uint64_t end, uint64_t length) {
  const std::string fields =
      end >= kTableSize ? file.read(end - kTableSize, kTableSize) : std::string(kTableSize, '\0');
  const auto block = static_cast<uint32_t>(number_in(fields, 16) & 0xFFFFFFFF);
  if (fields.compare(0, 8, kTableMark) != 0 || block < kSmallestBlock || number_in(fields, 8) != length) {
    throw DamagedData{"the list of its checksums is missing or damaged"};
  }
  const uint64_t count = length / block + (length % block != 0);
  if (length + 4 * count + kTableSize != end) {
    throw DamagedData{"it has more or fewer bytes than its checksums are for"};
  }
  const std::string sums = file.read(length, 4 * count);
  if (table_of(sums, length, block) != fields) throw DamagedData{"the list of its checksums is damaged"};
  Bytes data = allocate(length);
  for (uint64_t index = 0; index < count; ++index) {
    const uint64_t start = index * block, stop = std::min(start + block, length);
    file.read_into(data.data + start, stop - start, start);
    const auto wanted = number_at<uint32_t>(reinterpret_cast<const uint8_t*>(sums.data()) + 4 * index);
    if (crc32(data.data + start, static_cast<size_t>(stop - start)) != wanted) throw DamagedBlock{start, stop};
  }
  return data;
}

}  // namespace onnxtrain::device
