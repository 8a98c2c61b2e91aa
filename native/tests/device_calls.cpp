// Calls the device half for the tests: a call in each line of the input, its words separated by
// tabs; a line of the output for each, "ok" with a result, or "error" with the sentence.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <sstream>
#include <vector>

#include "adapter.h"
#include "checkpoint.h"
#include "export_model.h"
#include "files.h"
#include "json.h"
#include "text.h"

namespace {

using namespace onnxtrain::device;

using Words = std::vector<std::string>;

Words words_of(const std::string& line) {
  Words words;
  std::stringstream parts(line);
  for (std::string word; std::getline(parts, word, '\t');) words.push_back(word);
  return words;
}

Bytes bytes_of(const std::string& path) {
  const OpenFile file(path);
  return file.read_all();
}

Order order_of(const std::string& word) { return word == "sorted" ? Order::kByName : Order::kAsGiven; }

std::string counts(const CheckpointContent& content) {
  std::stringstream text;
  text << content.trainable.size() << " " << content.frozen.size() << " " << content.groups.size() << " "
       << content.properties.size();
  return text.str();
}

// Exports an evaluation model with the values of a checkpoint, without onnxruntime.
void exported(const std::string& model, const std::string& checkpoint, const std::string& target,
              const std::string& outputs, const std::string& threshold) {
  const CheckpointContent held = read_checkpoint(checkpoint);
  const auto value = [&](const std::string& name) {
    const Tensor* found = held.trainable.find(name);
    return found != nullptr ? found : held.frozen.find(name);
  };
  ExportRequest request;
  std::stringstream names(outputs);
  for (std::string name; std::getline(names, name, ',');) request.names.push_back(name);
  request.external_data_threshold = std::stoull(threshold);
  export_model(read_model(model), value, {}, target, request);
}

std::string called(const Words& words) {
  const std::string& call = words.at(0);
  if (call == "read") return counts(read_checkpoint(words.at(1)));
  if (call == "read_bytes") return counts(read_checkpoint(bytes_of(words.at(1))));
  if (call == "copy") {
    write_checkpoint(words.at(2), read_checkpoint(words.at(1)), order_of(words.at(3)), std::stoull(words.at(4)));
    return "";
  }
  if (call == "copy_bytes") {
    std::ofstream(words.at(2), std::ios::binary)
        << checkpoint_bytes(read_checkpoint(bytes_of(words.at(1))), order_of(words.at(3)));
    return "";
  }
  if (call == "export") {
    exported(words.at(1), words.at(2), words.at(3), words.at(4), words.at(5));
    return "";
  }
  if (call == "copy_adapter") {
    write_adapter(words.at(2), read_adapter(words.at(1)));
    return "";
  }
  if (call == "json") {
    Json found;
    if (!parse_json(words.at(1), Numbers::kFromWords, found)) throw Error("it is no JSON");
    return to_json(found);
  }
  throw Error("there is no call " + quoted(call));
}

// A sentence on one line: another sign stands for the end of a line.
std::string in_one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', '\x1e');
  return text;
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      const std::string result = called(words_of(line));
      std::cout << "ok\t" << in_one_line(result) << std::endl;
    } catch (const std::exception& error) {
      std::cout << "error\t" << in_one_line(error.what()) << std::endl;
    }
  }
}
