// Greedy decoding of an exported model in C++, with PyTorch's libraries alone.
//
//     decode FOLDER NEW_TOKENS ID…      prints the new ids of row 0, and tokens per second on stderr
//
// FOLDER is what lamina.export(model, target="aotinductor") wrote. Weights and cache are tensors of this program; every
// compiled program works on them in place. One call of `decode` takes the last id of each row and returns the next one:
// the cache, the lengths of the rows and the argmax are inside.

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

using torch::inductor::AOTIModelPackageLoader;

static at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> known = {
      {"float64", at::kDouble}, {"float32", at::kFloat},  {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
      {"int64", at::kLong},     {"int32", at::kInt},      {"int16", at::kShort},  {"int8", at::kChar},
      {"uint8", at::kByte},     {"bool", at::kBool},
  };
  auto found = known.find(name);
  if (found == known.end()) throw std::runtime_error("unknown dtype " + name);
  return found->second;
}

struct Exported {
  std::filesystem::path folder;
  int64_t rows = 0, chunk = 0, limit = 0;
  std::string device = "cpu";
  std::vector<int64_t> eos;
  std::unordered_map<std::string, at::Tensor> tensors;  // weights and cache, by name
  std::map<std::string, std::unique_ptr<AOTIModelPackageLoader>> programs;

  explicit Exported(const std::string& path) : folder(path) {
    std::ifstream lines(folder / "tensors.txt");
    if (!lines) throw std::runtime_error(path + " has no tensors.txt: export with the target aotinductor");
    at::Tensor blob = read_weights();
    std::string line, what;
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      words >> what;
      if (what == "rows") words >> rows;
      else if (what == "chunk") words >> chunk;
      else if (what == "limit") words >> limit;
      else if (what == "device") words >> device;
      else if (what == "eos") for (int64_t id; words >> id;) eos.push_back(id);
      else add_tensor(what == "weight", words, blob);
    }
    for (const char* name : {"prefill", "decode"}) load(name);
  }

  // Runs a program over ids [rows, T], of which each row has counts [rows] -> {next ids [rows], logits [rows, vocab]}
  std::vector<at::Tensor> run(const std::string& name, const at::Tensor& ids, const at::Tensor& counts) {
    return programs.at(name)->run({ids.to(device), counts.to(device)});
  }

 private:
  at::Tensor read_weights() {
    auto size = std::filesystem::file_size(folder / "weights.bin");
    at::Tensor blob = at::empty({static_cast<int64_t>(size)}, at::kByte);
    std::ifstream file(folder / "weights.bin", std::ios::binary);
    if (!file.read(static_cast<char*>(blob.data_ptr()), size)) throw std::runtime_error("weights.bin was cut short");
    return blob;
  }

  void add_tensor(bool weight, std::istringstream& words, const at::Tensor& blob) {
    std::string name, dtype;
    int64_t offset = 0;
    std::vector<int64_t> shape;
    words >> name >> dtype >> offset;
    for (int64_t size; words >> size;) shape.push_back(size);
    auto type = dtype_of(dtype);
    if (!weight) {
      tensors[name] = at::zeros(shape, at::TensorOptions(type).device(device));
      return;
    }
    int64_t bytes = c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(type));
    if (offset + bytes > blob.numel()) throw std::runtime_error(name + " ends after the end of weights.bin");
    tensors[name] = blob.slice(0, offset, offset + bytes).view(type).view(shape).to(device);
  }

  void load(const std::string& name) {
    auto path = folder / "programs" / (name + ".pt2");
    if (!std::filesystem::exists(path)) return;
    auto program = std::make_unique<AOTIModelPackageLoader>(path.string(), "model");
    std::unordered_map<std::string, at::Tensor> needed;
    for (const auto& fqn : program->get_constant_fqns()) {
      auto found = tensors.find(fqn);
      if (found == tensors.end()) found = tensors.find(name + "/" + fqn);
      if (found == tensors.end()) throw std::runtime_error(name + " needs " + fqn + ", which tensors.txt lacks");
      needed[fqn] = found->second;
    }
    program->load_constants(needed, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
    programs[name] = std::move(program);
  }
};

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::cerr << "usage: decode FOLDER NEW_TOKENS ID...\n";
    return 2;
  }
  c10::AutoGradMode no_gradients(false);
  Exported model(argv[1]);
  const int64_t wanted = std::stoll(argv[2]);
  std::vector<int64_t> prompt;
  for (int i = 3; i < argc; ++i) prompt.push_back(std::stoll(argv[i]));
  if (model.limit && static_cast<int64_t>(prompt.size()) + wanted - 1 > model.limit) {
    throw std::runtime_error("the prompt and the new tokens are more than the " + std::to_string(model.limit) +
                             " tokens that the program was exported for: export it with a larger capacity");
  }

  // The prompt is row 0; the other rows stay empty. Without `prefill`, it is fed token by token.
  at::Tensor counts = at::zeros({model.rows}, at::kLong), next;
  int64_t at = 0, length = static_cast<int64_t>(prompt.size());
  while (at < length) {
    int64_t n = model.programs.count("prefill") ? std::min(model.chunk, length - at) : 1;
    at::Tensor ids = at::zeros({model.rows, n}, at::kLong);
    for (int64_t i = 0; i < n; ++i) ids.index_put_({at::tensor(0), at::tensor(i)}, prompt[at + i]);
    counts[0] = n;
    next = model.run(n == 1 ? "decode" : "prefill", ids, counts)[0];
    at += n;
  }

  counts[0] = 1;
  auto begin = std::chrono::steady_clock::now();
  for (int64_t made = 0; made < wanted; ++made) {
    int64_t id = next[0].item<int64_t>();
    std::cout << id << (made + 1 == wanted ? "" : " ") << std::flush;
    if (std::find(model.eos.begin(), model.eos.end(), id) != model.eos.end() || made + 1 == wanted) break;
    next = model.run("decode", next.unsqueeze(1), counts)[0];
  }
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::cout << "\n";
  std::cerr << (wanted - 1) / took.count() << " tokens/s\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << "decode: " << error.what() << "\n";
  return 1;
}
