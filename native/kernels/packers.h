// Packers, which say where a product reads its panels from, and stores, which say where it writes.
//
// A panel of the left side holds `count` rows in blocks of kLanes along the depth: [block][row][kLanes].
// A panel of the right side holds columns, `width` of them with zeros behind the last: [depth][width].
// Panels of bfloat16 hold pairs along the depth in the place of floats, zeros behind the depth. Packers of matrices
// write them by `pairs`; what others have written is rounded in place.
#pragma once

#include <vector>

#include "compute.h"
#include "half.h"

namespace onnxtrain::ONNXTRAIN_ISA {

// Rows of a matrix for the left side.
struct MatrixRows {
  const float* data;
  int64_t line, step;  // from row to row, and along the depth

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    for (int64_t done = 0; done < depth; done += kLanes, panel += count * kLanes) {
      const float* from = data + first * line + (k + done) * step;
      const int64_t left = std::min<int64_t>(depth - done, kLanes);
      if (step == 1) {
        for (int64_t i = 0; i < count; ++i) store(panel + i * kLanes, load_first(from + i * line, left));
      } else if (line == 1) {
        for (int64_t i = 0; i < count; i += kLanes)
          transposed(from + i, std::min<int64_t>(count - i, kLanes), left, panel + i * kLanes);
      } else {
        for (int64_t i = 0; i < count; ++i)
          for (int64_t x = 0; x < kLanes; ++x) panel[i * kLanes + x] = x < left ? from[i * line + x * step] : 0;
      }
    }
  }

  ONNXTRAIN_BF16 void pairs(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    if (step != 1 && line != 1) {
      (*this)(panel, first, count, k, depth);
      return round_blocks(panel, (depth + kLanes - 1) / kLanes, count);
    }
    for (int64_t done = 0; done < depth; done += 2 * kLanes, panel += count * kLanes) {
      const float* from = data + first * line + (k + done) * step;
      const int64_t left = depth - done;
      if (step == 1)
        for (int64_t i = 0; i < count; ++i, from += line)
          store(panel + i * kLanes, pairs_along(load_first(from, left), load_first(from + kLanes, left - kLanes)));
      else
        for (int64_t i = 0; i < count; i += kLanes)
          transpose_pairs(from + i, step, std::min<int64_t>(count - i, kLanes), left, panel + i * kLanes, kLanes);
    }
  }

 private:
  // At most kLanes rows that lie side by side, kLanes deep.
  void transposed(const float* from, int64_t rows, int64_t depth, float* panel) const {
    Vector square[kLanes];
    if (depth == kLanes) {
#pragma GCC unroll 16
      for (int x = 0; x < kLanes; ++x) square[x] = load_first(from + x * step, rows);
    } else {
      for (int x = 0; x < kLanes; ++x) square[x] = x < depth ? load_first(from + x * step, rows) : Vector{};
    }
    transpose(square);
    for (int i = 0; i < rows; ++i) store(panel + i * kLanes, square[i]);
  }
};

// Rows that lie side by side, for a left side whose panels are [depth][kLinesOfPanel]: nothing is transposed.
struct MatrixLines {
  const float* data;
  int64_t step;  // along the depth

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    const float* from = data + first + k * step;
    for (int64_t x = 0; x < depth; ++x, from += step, panel += kLinesOfPanel)
      for (int64_t i = 0; i < kLinesOfPanel; i += kLanes) store(panel + i, load_first(from + i, count - i));
  }

  ONNXTRAIN_BF16 void pairs(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    const float* from = data + first + k * step;
    for (int64_t x = 0; x < depth; x += 2, from += 2 * step, panel += kLinesOfPanel)
      for (int64_t i = 0; i < kLinesOfPanel; i += kLanes) {
        const Vector next = x + 1 < depth ? load_first(from + step + i, count - i) : Vector{};
        store(panel + i, pairs_across(load_first(from + i, count - i), next));
      }
  }
};

// Columns of a matrix for the right side.
struct MatrixColumns {
  const float* data;
  int64_t line, step;  // from column to column, and along the depth

  void operator()(float* panel, int64_t first, int64_t count, int64_t width, int64_t k, int64_t depth) const {
    const float* from = data + first * line + k * step;
    if (line == 1 && count == kColumns) {
      for (int64_t x = 0; x < depth; ++x, from += step, panel += kColumns)
        for (int j = 0; j < kColumns; j += kLanes) store(panel + j, load(from + j));
    } else if (line == 1) {
      for (int64_t x = 0; x < depth; ++x, from += step, panel += width)
        for (int64_t j = 0; j < width; j += kLanes) store(panel + j, load_first(from + j, count - j));
    } else if (step == 1) {
      for (int64_t j = 0; j < width; j += kLanes)
        transpose_lines(from + j * line, line, std::min<int64_t>(count - j, kLanes), depth, panel + j, width);
    } else {
      for (int64_t x = 0; x < depth; ++x, panel += width)
        for (int64_t j = 0; j < width; ++j) panel[j] = j < count ? from[j * line + x * step] : 0;
    }
  }

  ONNXTRAIN_BF16 void pairs(float* panel, int64_t first, int64_t count, int64_t width, int64_t k,
                            int64_t depth) const {
    const float* from = data + first * line + k * step;
    if (line == 1) {
      for (int64_t x = 0; x < depth; x += 2, from += 2 * step, panel += width)
        for (int64_t j = 0; j < width; j += kLanes) {
          const Vector next = x + 1 < depth ? load_first(from + step + j, count - j) : Vector{};
          store(panel + j, pairs_across(load_first(from + j, count - j), next));
        }
    } else if (step == 1) {
      for (int64_t j = 0; j < width; j += kLanes)
        for (int64_t x = 0; x < depth; x += 2 * kLanes)
          transposed(from + j * line + x, std::min<int64_t>(count - j, kLanes), depth - x, panel + x / 2 * width + j,
                     width);
    } else {
      (*this)(panel, first, count, width, k, depth);
      round_rows(panel, depth, width);
    }
  }

 private:
  // Pairs of at most kLanes columns that lie along the depth, 2 · kLanes deep.
  ONNXTRAIN_BF16 void transposed(const float* from, int64_t columns, int64_t depth, float* panel, int64_t width) const {
    Vector square[kLanes];
    for (int64_t i = 0; i < kLanes; ++i, from += line)
      square[i] = i < columns ? pairs_along(load_first(from, depth), load_first(from + kLanes, depth - kLanes))
                              : Vector{};
    transpose(square);
    const int64_t rows = std::min<int64_t>(kLanes, (depth + 1) / 2);
    for (int64_t i = 0; i < rows; ++i) store(panel + i * width, square[i]);
  }
};

// The positions of a grid in all images of a batch, by rows of the grid.
struct Grid {
  int64_t size[kMostAxes];

  int64_t positions() const { return size[0] * size[1] * size[2]; }

  struct Piece {
    int64_t begin, length, image, z, y, x;
  };

  // Calls use(piece) for each part of a row within [first, first + count).
  template <class Use>
  void pieces(int64_t first, int64_t count, const Use& use) const {
    const int64_t all = positions();
    int64_t image = first / all, x = first % all % size[2], y = first % all / size[2] % size[1],
            z = first % all / size[2] / size[1];
    for (int64_t done = 0; done < count; x = 0) {
      const int64_t length = std::min(count - done, size[2] - x);
      use(Piece{done, length, image, z, y, x});
      done += length;
      if (++y < size[1]) continue;
      y = 0;
      if (++z < size[0]) continue;
      z = 0;
      ++image;
    }
  }
};

// The places of an image that each position of a grid reads, one for each channel and tap:
// position · step + offset of the tap, or zero outside of the image.
struct Patches {
  struct Tap {
    int64_t offset[kMostAxes];
  };
  const float* image;
  int64_t batch_stride;     // from image to image
  int64_t size[kMostAxes];  // of the image
  Grid grid;
  int64_t step[kMostAxes];
  std::vector<Tap> taps;

  int64_t pixels() const { return size[0] * size[1] * size[2]; }
  int64_t tap_count() const { return static_cast<int64_t>(taps.size()); }

  std::vector<Grid::Piece> pieces(int64_t first, int64_t count) const {
    std::vector<Grid::Piece> found;
    grid.pieces(first, count, [&](Grid::Piece piece) {
      piece.image *= batch_stride;
      piece.z *= step[0];
      piece.y *= step[1];
      piece.x *= step[2];
      found.push_back(piece);
    });
    return found;
  }

  // Writes what a piece of a row reads at a tap; `channel` is where its plane of the first image begins.
  void copy(const Grid::Piece& piece, const float* channel, const Tap& tap, float* to) const {
    const int64_t z = piece.z + tap.offset[0], y = piece.y + tap.offset[1], x = piece.x + tap.offset[2];
    const int64_t width = size[2], length = piece.length;
    if (z < 0 || z >= size[0] || y < 0 || y >= size[1]) {
      std::fill_n(to, length, 0.0f);
      return;
    }
    const float* line = channel + piece.image + (z * size[1] + y) * width;
    const int64_t stride = step[2];
    // Positions [begin, end) read inside of the line.
    const int64_t begin = x >= 0 ? 0 : std::min(length, (stride - 1 - x) / stride);
    const int64_t end = x >= width ? begin : std::max(begin, std::min(length, (width - 1 - x) / stride + 1));
    for (int64_t j = 0; j < begin; ++j) to[j] = 0;
    const float* from = line + x + begin * stride;
    if (stride == 1)
      copy_floats(from, end - begin, to + begin);
    else if (stride == 2)
      copy_even(from, 2 * (end - begin) - 1, to + begin);
    else
      for (int64_t j = begin; j < end; ++j, from += stride) to[j] = *from;
    for (int64_t j = end; j < length; ++j) to[j] = 0;
  }
};

// The planes of all images, one channel a line along the depth, for the right side.
struct ChannelColumns {
  const float* data;
  int64_t batch_stride, positions;

  void operator()(float* panel, int64_t first, int64_t count, int64_t width, int64_t k, int64_t depth) const {
    int64_t image = first / positions, at = first % positions;
    for (int64_t done = 0; done < count; ++image, at = 0) {
      const int64_t length = std::min(count - done, positions - at);
      const float* from = data + image * batch_stride + k * positions + at;
      float* to = panel + done;
      if (length == kColumns)
        for (int64_t x = 0; x < depth; ++x, from += positions, to += width)
          for (int j = 0; j < kColumns; j += kLanes) store(to + j, load(from + j));
      else
        for (int64_t x = 0; x < depth; ++x, from += positions, to += width) copy_floats(from, length, to);
      done += length;
    }
    if (count < width)
      for (int64_t x = 0; x < depth; ++x)
        for (int64_t j = count; j < width; ++j) panel[x * width + j] = 0;
  }
};

// The same where depth runs over the positions, and each column is a channel.
struct ChannelLines {
  const float* data;
  int64_t batch_stride, positions;

  void operator()(float* panel, int64_t first, int64_t count, int64_t width, int64_t k, int64_t depth) const {
    int64_t image = k / positions, at = k % positions;
    for (int64_t done = 0; done < depth; ++image, at = 0) {
      const int64_t length = std::min(depth - done, positions - at);
      const float* from = data + image * batch_stride + first * positions + at;
      for (int64_t j = 0; j < width; j += kLanes)
        transpose_lines(from + j * positions, positions, std::min<int64_t>(count - j, kLanes), length,
                        panel + done * width + j, width);
      done += length;
    }
  }
};

// Lines of channels along the positions of all images: rows of the left side, depth over positions.
struct ChannelRows {
  const float* data;
  int64_t batch_stride, positions;

  void operator()(float* panel, int64_t first, int64_t count, int64_t k, int64_t depth) const {
    int64_t image = k / positions, at = k % positions;
    for (int64_t done = 0; done < depth; done += kLanes, panel += count * kLanes) {
      const int64_t block = std::min<int64_t>(depth - done, kLanes);
      for (int64_t filled = 0; filled < block;) {
        const int64_t length = std::min(block - filled, positions - at);
        const float* from = data + image * batch_stride + first * positions + at;
        if (length == kLanes)
          for (int64_t i = 0; i < count; ++i) store(panel + i * kLanes, load(from + i * positions));
        else
          for (int64_t i = 0; i < count; ++i) copy_floats(from + i * positions, length, panel + i * kLanes + filled);
        filled += length;
        at += length;
        if (at == positions) at = 0, ++image;
      }
    }
  }
};

// Sets or adds to part of a row.
inline void put_row(const float* from, int64_t count, float* to, bool fresh) {
  for (int64_t x = 0; x < count; x += kLanes) {
    const Vector added = load(from + x);
    store_first(to + x, fresh ? added : added + load_first(to + x, count - x), count - x);
  }
}

// A matrix as the place of results; its rows may begin as copies of one.
struct MatrixStore {
  float* data;
  int64_t row;
  const float* bias = nullptr;

  float* run(int64_t i, int64_t j, int64_t) const { return data + i * row + j; }  // always whole
  int64_t stride() const { return row; }

  // Writes what a part begins with; whether there is something.
  bool begin(int64_t i, int64_t rows, int64_t j, int64_t columns) const {
    if (bias == nullptr) return false;
    for (int64_t r = 0; r < rows; ++r) copy_floats(bias + j, columns, data + (i + r) * row + j);
    return true;
  }

  // Puts rows of a tile, kColumns apart, where they belong.
  void put(const float* tile, int64_t i, int64_t rows, int64_t j, int64_t columns, bool fresh) const {
    for (int64_t r = 0; r < rows; ++r) put_row(tile + r * kColumns, columns, data + (i + r) * row + j, fresh);
  }
};

// Channels × positions of all images. Positions may be those of a phase: every `step`-th pixel.
struct ImageStore {
  float* data;
  int64_t batch_stride, channel_stride;
  Grid grid;
  int64_t size[kMostAxes];  // of the image
  int64_t first[kMostAxes], step[kMostAxes];
  bool dense;  // all pixels in order

  float* run(int64_t i, int64_t j, int64_t count) const {
    const int64_t positions = grid.positions();
    if (!dense || j % positions + count > positions) return nullptr;
    return data + j / positions * batch_stride + i * channel_stride + j % positions;
  }
  int64_t stride() const { return channel_stride; }

  void put(const float* tile, int64_t i, int64_t rows, int64_t j, int64_t columns, bool fresh) const {
    grid.pieces(j, columns, [&](const Grid::Piece& piece) { put_piece(tile, kColumns, i, rows, piece, fresh); });
  }

  // Puts part of a tile, whose rows are `stride` apart, where a piece of the grid lies.
  void put_piece(const float* tile, int64_t stride, int64_t i, int64_t rows, const Grid::Piece& piece,
                 bool fresh) const {
    const int64_t z = first[0] + piece.z * step[0], y = first[1] + piece.y * step[1], x = first[2] + piece.x * step[2];
    float* to = data + piece.image * batch_stride + i * channel_stride + (z * size[1] + y) * size[2] + x;
    const float* from = tile + piece.begin;
    for (int64_t r = 0; r < rows; ++r, to += channel_stride, from += stride) {
      if (step[2] == 1) {
        put_row(from, piece.length, to, fresh);
        continue;
      }
      for (int64_t c = 0; c < piece.length; ++c) {
        float& place = to[c * step[2]];
        place = fresh ? from[c] : place + from[c];
      }
    }
  }
};

}  // namespace onnxtrain::ONNXTRAIN_ISA
