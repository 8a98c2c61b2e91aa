// The seed of each step's random numbers: computed from a seed and the number of draws so far, which
// are saved, so that a resumed run draws what it would have drawn.
#pragma once

#include <cstdint>

#include "json.h"

namespace onnxtrain::device {

// Determines everything that is random in training from here on, in this process.
void set_seed(uint64_t seed);

class RandomSeeds {
 public:
  RandomSeeds();
  explicit RandomSeeds(const Json& saved);

  // Writes the next seed into two words of 32 bits.
  void next(uint32_t* words);
  void take_back() { draws_ -= 1; }  // a run that failed, or was not finite, does not count
  Json saved();

 private:
  void heed_set_seed();  // starts anew if `set_seed` was called since

  uint64_t seed_ = 0, draws_ = 0;
  int64_t times_seeded_ = -1;
};

}  // namespace onnxtrain::device
