#include "model_parts.h"

#include <algorithm>
#include <map>

#include "errors.h"
#include "text.h"

namespace onnxtrain::device {

namespace {

constexpr size_t kMaxDepth = 32;  // protobuf reads no deeper nesting: a body is three messages down
constexpr int kModelGraph = 7, kModelOpset = 8, kModelMetadata = 14, kModelTraining = 20, kModelFunction = 25;
constexpr int kGraphNode = 1, kGraphInitializer = 5, kGraphInput = 11, kGraphOutput = 12, kGraphValueInfo = 13,
              kGraphQuantization = 14, kGraphSparse = 15;
constexpr int kNodeInput = 1, kNodeOutput = 2, kNodeOperator = 4, kNodeAttribute = 5, kNodeDomain = 7,
              kNodeOverload = 8;
constexpr int kAttributeTensor = 5, kAttributeGraph = 6, kAttributeTensors = 10, kAttributeGraphs = 11;
constexpr int kFunctionName = 1, kFunctionNode = 7, kFunctionDomain = 10, kFunctionOverload = 13;
constexpr int kTensorName = 8, kTensorLocation = 14;
constexpr uint64_t kExternal = 1;

void read_graph(WireReader& reader, std::string_view graph, ModelParts& parts, size_t depth);

std::string_view raw(std::string_view message, const WireField& field) {
  return message.substr(field.start, field.end - field.start);
}

std::string without_alias(std::string domain) { return domain == "ai.onnx" ? "" : domain; }

std::string operator_of(const std::string& domain, const std::string& name, const std::string& overload) {
  return without_alias(domain) + '\0' + name + '\0' + overload;
}

std::string read_name(WireReader& reader, std::string_view message, int number, const std::string& where) {
  return reader.last_text(reader.pick(message, where, {number}), number, where + ".name");
}

// Refuses external data where pieces are copied as they are: the reference would dangle.
void require_inside(WireReader& reader, std::string_view tensor, const std::string& where) {
  reader.each(tensor, where, [&](const WireField& field) {
    if (field.number == kTensorLocation && field.value == kExternal) {
      reader.fail("the tensor is in another file; only initializers may be", where);
    }
  });
}

// Adds what a body takes from the graphs around it, and what it calls.
void read_body(WireReader& reader, std::string_view graph, size_t depth, Node& node) {
  if (depth > kMaxDepth) {
    reader.fail("bodies of nodes are nested more than " + std::to_string(kMaxDepth) + " deep", "node");
  }
  ModelParts body;
  read_graph(reader, graph, body, depth);
  for (const auto& item : body.initializers) require_inside(reader, item.second, "body.initializer");
  const Names own = body.value_names();
  const auto add = [&](const std::string& name) {
    if (own.count(name) == 0) node.reads.insert(name);
  };
  for (const auto& item : body.outputs) add(item.first);
  for (const Node& inner : body.nodes) {
    for (const std::string& name : inner.reads) add(name);
    node.calls.insert(inner.calls.begin(), inner.calls.end());
  }
}

void read_attribute(WireReader& reader, std::string_view message, size_t depth, Node& node) {
  reader.each(message, "attribute", [&](const WireField& field) {
    if (field.number == kAttributeGraph || field.number == kAttributeGraphs) {
      read_body(reader, reader.message(field, "attribute.graph"), depth + 1, node);
    } else if (field.number == kAttributeTensor || field.number == kAttributeTensors) {
      require_inside(reader, reader.message(field, "attribute.tensor"), "attribute.tensor");
    }
  });
}

Node read_node(WireReader& reader, std::string_view message, size_t depth) {
  Node node;
  node.data = message;
  std::string domain, name, overload;
  reader.each(message, "node", [&](const WireField& field) {
    switch (field.number) {
      case kNodeInput:
        node.reads.insert(reader.text(field, "node.input"));
        break;
      case kNodeOutput:
        node.outputs.push_back(reader.text(field, "node.output"));
        break;
      case kNodeOperator:
        name = reader.text(field, "node");
        break;
      case kNodeDomain:
        domain = reader.text(field, "node");
        break;
      case kNodeOverload:
        overload = reader.text(field, "node");
        break;
      case kNodeAttribute:
        read_attribute(reader, reader.message(field, "node.attribute"), depth, node);
        break;
    }
  });
  node.calls.insert(operator_of(domain, name, overload));
  // An empty name stands for an optional input or output that is not there.
  node.reads.erase("");
  node.outputs.erase(std::remove(node.outputs.begin(), node.outputs.end(), ""), node.outputs.end());
  return node;
}

void read_function(WireReader& reader, std::string_view message, ModelParts& parts) {
  Function function;
  function.data = message;
  std::string domain, name, overload;
  reader.each(message, "function", [&](const WireField& field) {
    if (field.number == kFunctionDomain) domain = reader.text(field, "function");
    if (field.number == kFunctionName) name = reader.text(field, "function");
    if (field.number == kFunctionOverload) overload = reader.text(field, "function");
    if (field.number != kFunctionNode) return;
    const Node node = read_node(reader, reader.message(field, "function.node"), 0);
    function.calls.insert(node.calls.begin(), node.calls.end());
  });
  parts.functions[operator_of(domain, name, overload)] = function;
}

std::string sparse_name(WireReader& reader, std::string_view message) {
  for (const WireField& field : reader.pick(message, "sparse_initializer", {1})) {
    return read_name(reader, reader.message(field, "sparse_initializer.values"), kTensorName, "sparse_initializer");
  }
  reader.fail("it has no values", "sparse_initializer");
}

void read_graph(WireReader& reader, std::string_view graph, ModelParts& parts, size_t depth) {
  struct List {
    int number;
    const char* where;
    int name;
    Pieces* pieces;
  };
  const List lists[] = {{kGraphInitializer, "initializer", kTensorName, &parts.initializers},
                        {kGraphInput, "input", 1, &parts.inputs},
                        {kGraphOutput, "output", 1, &parts.outputs},
                        {kGraphValueInfo, "value_info", 1, &parts.value_infos},
                        {kGraphQuantization, "quantization_annotation", 1, &parts.quantization}};
  reader.each(graph, "graph", [&](const WireField& field) {
    if (field.number == kGraphNode) {
      parts.nodes.push_back(read_node(reader, reader.message(field, "node"), depth));
      return;
    }
    if (field.number == kGraphSparse) {
      const std::string_view message = reader.message(field, "sparse_initializer");
      parts.sparse[sparse_name(reader, message)] = message;
      return;
    }
    for (const List& list : lists) {
      if (field.number != list.number) continue;
      const std::string_view message = reader.message(field, list.where);
      (*list.pieces)[read_name(reader, message, list.name, list.where)] = message;
      return;
    }
    parts.graph_head.push_back(raw(graph, field));
  });
}

using Producers = std::map<std::string, size_t>;

Producers producers_of(const ModelParts& parts) {
  Producers made;
  for (size_t index = 0; index < parts.nodes.size(); ++index) {
    for (const std::string& name : parts.nodes[index].outputs) {
      const bool is_given = parts.inputs.find(name) != nullptr || parts.initializers.find(name) != nullptr;
      if (is_given || !made.emplace(name, index).second) {
        throw ModelError(parts.source + ": " + quoted(name) + " is made in two places");
      }
    }
  }
  return made;
}

// Puts each node behind those that it reads from, which onnxruntime does not insist on.
std::vector<size_t> in_order(const ModelParts& parts, const std::set<size_t>& kept, const Producers& producers) {
  std::map<size_t, std::set<size_t>> before;
  bool is_ordered = true;
  for (const size_t index : kept) {
    for (const std::string& name : parts.nodes[index].reads) {
      const auto found = producers.find(name);
      if (found == producers.end()) continue;
      before[index].insert(found->second);
      is_ordered &= found->second < index;
    }
  }
  if (is_ordered) return {kept.begin(), kept.end()};
  std::map<size_t, std::vector<size_t>> after;
  std::vector<size_t> order;
  std::set<size_t> seen;
  const auto start_with = [&](size_t index) {
    if (seen.insert(index).second && before[index].empty()) order.push_back(index);
  };
  for (const size_t index : kept) {
    start_with(index);
    for (const size_t other : before[index]) {
      after[other].push_back(index);
      start_with(other);
    }
  }
  for (size_t done = 0; done < order.size(); ++done) {
    for (const size_t next : after[order[done]]) {
      before[next].erase(order[done]);
      if (before[next].empty()) order.push_back(next);
    }
  }
  if (order.size() != kept.size()) throw ModelError(parts.source + ": the graph has a cycle");
  return order;
}

// What nodes call, and what the functions among that call in turn.
Names all_calls(const ModelParts& parts, const std::vector<const Node*>& nodes) {
  Names calls, waiting;
  for (const Node* node : nodes) waiting.insert(node->calls.begin(), node->calls.end());
  while (!waiting.empty()) {
    const std::string call = *waiting.begin();
    waiting.erase(waiting.begin());
    calls.insert(call);
    const Function* function = parts.functions.find(call);
    if (function == nullptr) continue;
    for (const std::string& next : function->calls) {
      if (calls.count(next) == 0) waiting.insert(next);
    }
  }
  return calls;
}

}  // namespace

Names ModelParts::value_names() const {
  Names made;
  for (const Node& node : nodes) made.insert(node.outputs.begin(), node.outputs.end());
  for (const Pieces* pieces : {&inputs, &initializers, &sparse}) {
    for (const auto& item : *pieces) made.insert(item.first);
  }
  for (const auto& item : computed) made.insert(item.first);
  return made;
}

ModelParts take_apart(const ModelFile& model) {
  if (model.is_ort) {
    throw ModelError(model.name +
                     " is in the ORT format, from which nothing can be exported: pass the .onnx file of the evaluation "
                     "model instead");
  }
  WireReader reader(model.name);
  ModelParts parts;
  parts.source = model.name;
  const std::string_view data = model.data.view();
  std::string_view graph;
  reader.each(data, "model", [&](const WireField& field) {
    if (field.number == kModelOpset) {
      const std::string_view message = reader.message(field, "opset_import");
      parts.opsets.emplace_back(read_opset(reader, message), message);
    } else if (field.number == kModelFunction) {
      read_function(reader, reader.message(field, "function"), parts);
    } else if (field.number == kModelMetadata) {
      const auto [key, value] = read_entry(reader, reader.message(field, "metadata_props"));
      if (key != kMetadataKey) parts.properties[key] = value;  // ours is about the files that a device trains from
    } else if (field.number == kModelGraph) {
      graph = reader.message(field, "model");  // the only one: the model was read before
    } else if (field.number != kModelTraining) {
      parts.head.push_back(raw(data, field));
    }
  });
  read_graph(reader, graph, parts, 0);
  return parts;
}

Needed find_needed(const ModelParts& parts, const std::vector<std::string>& outputs) {
  const Producers producers = producers_of(parts);
  Needed needed;
  needed.values.insert(outputs.begin(), outputs.end());
  std::vector<std::string> waiting = outputs;
  std::set<size_t> kept;
  while (!waiting.empty()) {
    const auto found = producers.find(waiting.back());
    waiting.pop_back();
    if (found == producers.end() || !kept.insert(found->second).second) continue;
    for (const std::string& name : parts.nodes[found->second].reads) {
      if (needed.values.insert(name).second) waiting.push_back(name);
    }
  }
  for (const size_t index : in_order(parts, kept, producers)) {
    const Node& node = parts.nodes[index];
    needed.nodes.push_back(&node);
    needed.values.insert(node.outputs.begin(), node.outputs.end());
  }
  const Names calls = all_calls(parts, needed.nodes);
  needed.domains.insert("");
  for (const std::string& call : calls) needed.domains.insert(call.substr(0, call.find('\0')));
  for (const auto& [name, function] : parts.functions) {
    if (calls.count(name) > 0) needed.functions.push_back(function.data);
  }
  return needed;
}

}  // namespace onnxtrain::device
