// Rows of floats: copied, or taken apart and put together by the parity of their places. Short rows
// are as fast as long ones: two vectors that overlap cover what is not a whole number of them.
#pragma once

#include <cstdint>

namespace onnxtrain::ONNXTRAIN_ISA {

alignas(64) constexpr int kLaneNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <int kWidth>
struct Narrow {
  typedef float Type __attribute__((vector_size(kWidth * sizeof(float))));
  typedef float Unaligned __attribute__((vector_size(kWidth * sizeof(float)), aligned(sizeof(float)), may_alias));
  typedef int Mask __attribute__((vector_size(kWidth * sizeof(int)), may_alias));

  // 0, 1, 2 …
  static Mask lanes() { return *reinterpret_cast<const Mask*>(kLaneNumbers); }
  static Type read(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
  static void write(float* to, Type value) { *reinterpret_cast<Unaligned*>(to) = value; }
};

// Elements of an even place, or of an odd one, of two vectors behind each other; and the first or
// second half of two vectors whose elements alternate.
#define ONNXTRAIN_ALTERNATE(width, even_places, odd_places, first_places, second_places) \
  inline Narrow<width>::Type evens(Narrow<width>::Type a, Narrow<width>::Type b) {       \
    return __builtin_shufflevector(a, b, even_places);                                   \
  }                                                                                      \
  inline Narrow<width>::Type odds(Narrow<width>::Type a, Narrow<width>::Type b) {        \
    return __builtin_shufflevector(a, b, odd_places);                                    \
  }                                                                                      \
  inline Narrow<width>::Type first_half(Narrow<width>::Type a, Narrow<width>::Type b) {  \
    return __builtin_shufflevector(a, b, first_places);                                  \
  }                                                                                      \
  inline Narrow<width>::Type second_half(Narrow<width>::Type a, Narrow<width>::Type b) { \
    return __builtin_shufflevector(a, b, second_places);                                 \
  }
#define ONNXTRAIN_LIST(...) __VA_ARGS__

ONNXTRAIN_ALTERNATE(4, ONNXTRAIN_LIST(0, 2, 4, 6), ONNXTRAIN_LIST(1, 3, 5, 7), ONNXTRAIN_LIST(0, 4, 1, 5),
                    ONNXTRAIN_LIST(2, 6, 3, 7))
#if defined(__AVX2__)
ONNXTRAIN_ALTERNATE(8, ONNXTRAIN_LIST(0, 2, 4, 6, 8, 10, 12, 14), ONNXTRAIN_LIST(1, 3, 5, 7, 9, 11, 13, 15),
                    ONNXTRAIN_LIST(0, 8, 1, 9, 2, 10, 3, 11), ONNXTRAIN_LIST(4, 12, 5, 13, 6, 14, 7, 15))
#endif
#if defined(__AVX512F__)
ONNXTRAIN_ALTERNATE(16, ONNXTRAIN_LIST(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                    ONNXTRAIN_LIST(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31),
                    ONNXTRAIN_LIST(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                    ONNXTRAIN_LIST(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31))
#endif
#undef ONNXTRAIN_LIST
#undef ONNXTRAIN_ALTERNATE

// Calls work(place) for pieces of kWidth that cover [0, count); the last may overlap the one before.
template <int kWidth, class Work>
inline void cover(int64_t count, const Work& work) {
  int64_t at = 0;
  for (; at + kWidth <= count; at += kWidth) work(at);
  if (at < count) work(count - kWidth);
}

// Calls wide(Narrow) with the widest vector that a row of `count` fills, or one(place) for each
// element of a row that is shorter than any.
template <class Wide, class One>
inline void by_width(int64_t count, const Wide& wide, const One& one) {
#if defined(__AVX512F__)
  if (count >= 16) return wide(Narrow<16>());
#endif
#if defined(__AVX2__)
  if (count >= 8) return wide(Narrow<8>());
#endif
  if (count >= 4) return wide(Narrow<4>());
  for (int64_t at = 0; at < count; ++at) one(at);
}

template <class T>
struct WidthOf;
template <int kWidth>
struct WidthOf<Narrow<kWidth>> {
  static constexpr int value = kWidth;
};

// Copies rows of `count` elements; steps are from row to row.
inline void copy_rows(float* to, int64_t to_step, const float* from, int64_t from_step, int64_t rows, int64_t count) {
  by_width(
      count,
      [&](auto narrow) {
        using Own = decltype(narrow);
        for (int64_t row = 0; row < rows; ++row, to += to_step, from += from_step)
          cover<WidthOf<Own>::value>(count, [&](int64_t at) { Own::write(to + at, Own::read(from + at)); });
      },
      [&](int64_t at) {
        for (int64_t row = 0; row < rows; ++row) to[row * to_step + at] = from[row * from_step + at];
      });
}

// Elements of even places of each row go to one row, those of odd places to another; of `count`
// elements in all. The two rows have the same step.
inline void split_rows(float* even, float* odd, int64_t to_step, const float* from, int64_t from_step, int64_t rows,
                       int64_t count) {
  const int64_t pairs = count / 2;
  by_width(
      pairs,
      [&](auto narrow) {
        using Own = decltype(narrow);
        constexpr int width = WidthOf<Own>::value;
        for (int64_t row = 0; row < rows; ++row)
          cover<width>(pairs, [&](int64_t at) {
            const float* own = from + row * from_step + 2 * at;
            const auto a = Own::read(own), b = Own::read(own + width);
            Own::write(even + row * to_step + at, evens(a, b));
            Own::write(odd + row * to_step + at, odds(a, b));
          });
      },
      [&](int64_t at) {
        for (int64_t row = 0; row < rows; ++row) {
          even[row * to_step + at] = from[row * from_step + 2 * at];
          odd[row * to_step + at] = from[row * from_step + 2 * at + 1];
        }
      });
  if (count % 2 != 0)
    for (int64_t row = 0; row < rows; ++row) even[row * to_step + pairs] = from[row * from_step + count - 1];
}

// The opposite of split_rows.
inline void join_rows(float* to, int64_t to_step, const float* even, const float* odd, int64_t from_step, int64_t rows,
                      int64_t count) {
  const int64_t pairs = count / 2;
  by_width(
      pairs,
      [&](auto narrow) {
        using Own = decltype(narrow);
        constexpr int width = WidthOf<Own>::value;
        for (int64_t row = 0; row < rows; ++row)
          cover<width>(pairs, [&](int64_t at) {
            const auto a = Own::read(even + row * from_step + at), b = Own::read(odd + row * from_step + at);
            float* own = to + row * to_step + 2 * at;
            Own::write(own, first_half(a, b));
            Own::write(own + width, second_half(a, b));
          });
      },
      [&](int64_t at) {
        for (int64_t row = 0; row < rows; ++row) {
          to[row * to_step + 2 * at] = even[row * from_step + at];
          to[row * to_step + 2 * at + 1] = odd[row * from_step + at];
        }
      });
  if (count % 2 != 0)
    for (int64_t row = 0; row < rows; ++row) to[row * to_step + count - 1] = even[row * from_step + pairs];
}

}  // namespace onnxtrain::ONNXTRAIN_ISA
