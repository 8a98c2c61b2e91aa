#include "random_seeds.h"

#include <mutex>
#include <random>

namespace onnxtrain::device {

namespace {

struct ProcessSeed {
  std::mutex guard;
  uint64_t seed = 0;
  int64_t times_seeded = 0;
};

ProcessSeed& process_seed() {
  static ProcessSeed held;
  return held;
}

// Spreads the bits of a counter over a number of 64 bits (splitmix64).
uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// The last 64 bits of a number of any size.
uint64_t last_bits(const Json& number) {
  uint64_t bits = 0;
  for (const char digit : number.text) bits = bits * 10 + static_cast<uint64_t>(digit - '0');
  return bits;
}

}  // namespace

void set_seed(uint64_t seed) {
  ProcessSeed& held = process_seed();
  const std::lock_guard<std::mutex> lock(held.guard);
  held.seed = seed;
  held.times_seeded += 1;
}

RandomSeeds::RandomSeeds() { heed_set_seed(); }

RandomSeeds::RandomSeeds(const Json& saved)
    : seed_(last_bits(*saved.find("seed"))), draws_(last_bits(*saved.find("draws"))) {
  ProcessSeed& held = process_seed();
  const std::lock_guard<std::mutex> lock(held.guard);
  times_seeded_ = held.times_seeded;
}

void RandomSeeds::heed_set_seed() {
  ProcessSeed& held = process_seed();
  const std::lock_guard<std::mutex> lock(held.guard);
  if (times_seeded_ == held.times_seeded) return;
  times_seeded_ = held.times_seeded;
  draws_ = 0;
  std::random_device source;
  seed_ = held.times_seeded > 0 ? held.seed : static_cast<uint64_t>(source()) << 32 | source();
}

void RandomSeeds::next(uint32_t* words) {
  heed_set_seed();
  draws_ += 1;
  const uint64_t bits = mixed(seed_ + draws_ * 0x9E3779B97F4A7C15u);
  words[0] = static_cast<uint32_t>(bits);
  words[1] = static_cast<uint32_t>(bits >> 32);
}

Json RandomSeeds::saved() {
  heed_set_seed();
  Json record = Json::of_object();
  record.set("seed", Json::of_unsigned(seed_));
  record.set("draws", Json::of_unsigned(draws_));
  return record;
}

}  // namespace onnxtrain::device
