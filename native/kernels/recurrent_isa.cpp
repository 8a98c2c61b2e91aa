// Compiled once for each instruction set: ONNXTRAIN_ISA names it.
#include "recurrent_backward.h"
#include "recurrent_forward.h"

namespace onnxtrain::ONNXTRAIN_ISA {

void recurrent_forward(const RecurrentLayer& layer, const RecurrentOutputs& out, const Parallel& parallel) {
  for (int64_t direction = 0; direction < layer.directions; ++direction)
    ForwardPass(layer, direction, out, parallel).run();
}

void recurrent_backward(const RecurrentLayer& layer, const RecurrentGradients& io, const Parallel& parallel) {
  for (int64_t direction = 0; direction < layer.directions; ++direction)
    BackwardPass(layer, direction, io, parallel).run();
}

const Recurrence kRecurrence = {recurrent_forward, recurrent_backward};

}  // namespace onnxtrain::ONNXTRAIN_ISA
