// A model taken apart into pieces that stay as they are, and what of it a set of outputs needs.
//
// Nodes, types and weights remain the bytes of the file. Of a node only the names are read: what it
// computes, from what, and by which operator. The bodies of If, Loop and Scan are looked through for
// values of the graph around them.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "model_layout.h"
#include "wire.h"

namespace onnxtrain::device {

using Names = std::set<std::string>;
using Pieces = Named<std::string_view>;

// A node. `reads` has what its bodies take from outside too, `calls` what they call.
struct Node {
  std::string_view data;
  Names reads;
  std::vector<std::string> outputs;
  Names calls;  // domain, name and overload of each operator, with zero bytes between them
};

// A function of the model, and what it calls.
struct Function {
  std::string_view data;
  Names calls;
};

// A model in pieces. Pieces go by the name of the value that they are about.
struct ModelParts {
  std::string source;                  // what messages call the model
  std::vector<std::string_view> head;  // whole fields of the model
  Named<std::string> properties;       // the metadata of the model
  std::vector<std::pair<std::string, std::string_view>> opsets;
  Named<Function> functions;
  std::vector<std::string_view> graph_head;  // whole fields of the graph
  std::vector<Node> nodes;
  Pieces inputs, outputs, value_infos, initializers, sparse, quantization;
  Named<Tensor> computed;  // once, before export

  Names value_names() const;  // of all values of the main graph
};

// What some outputs are computed from.
struct Needed {
  std::vector<const Node*> nodes;
  Names values, domains;
  std::vector<std::string_view> functions;

  bool has(const std::string& name) const { return values.count(name) > 0; }
};

ModelParts take_apart(const ModelFile& model);

// What the outputs are computed from; nodes keep their order if it is one in which they can run.
Needed find_needed(const ModelParts& parts, const std::vector<std::string>& outputs);

}  // namespace onnxtrain::device
