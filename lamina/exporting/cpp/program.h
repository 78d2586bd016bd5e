// `Program`: an exported model in C++, with PyTorch's libraries alone. Reads the folder that
// lamina.export(model, to=FOLDER, target="aotinductor") wrote.
//
//     Program program("model.aoti");
//     program.feed({{1, 2, 3}, {4, 5}});       // rows of different lengths
//     program.decode();                        // feeds each row its most likely next id, program.next
//     program.rewind({0, 1});                  // the last token of row 1 is dropped
//     program.reset({0, 1});                   // both rows are empty again
//
// The files are compared with the checksums in tensors.txt; an altered or cut one is refused with its name.
// Weights and cache are tensors of this class; every compiled program works on them in place. One call of a program
// takes ids and returns the most likely next ids: the cache, the lengths of the rows and the argmax are inside.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#ifdef __linux__
#include <sys/mman.h>
#endif
#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

using Row = std::vector<int64_t>;
constexpr int64_t FORMAT = 2;  // VERSION in manifest.py

inline at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> known = {
      {"float64", at::kDouble}, {"float32", at::kFloat}, {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16}, {"float8_e4m3fn", at::kFloat8_e4m3fn}, {"float8_e5m2", at::kFloat8_e5m2},
      {"int64", at::kLong}, {"int32", at::kInt}, {"int16", at::kShort},
      {"int8", at::kChar}, {"uint8", at::kByte}, {"bool", at::kBool},
  };
  auto found = known.find(name);
  if (found == known.end()) throw std::runtime_error("unknown dtype " + name);
  return found->second;
}

class Program {
 public:
  int64_t rows = 0, chunk = 0, limit = 0, slack = 0, vocab = 0, states = 0, source = 0;  // as in manifest.json
  int64_t format = 0, source_vocab = 0, source_least = 0;
  int64_t slots = 0;  // least size of the input `slots`; 0 if the programs have no such input
  std::vector<int64_t> features;  // shape of a source's feature, if sources are features and not ids: [mels]
  bool reads_features = false;
  at::ScalarType features_dtype = at::kFloat;
  Row eos, start;      // ids that end a row, and that a row with a source begins with
  Row lengths, next;   // of each row: tokens that it holds, most likely next id (-1 while the row is empty)

  explicit Program(const std::string& path) : folder(path) {
    std::istringstream lines(read_description());
    at::Tensor blob;
    std::map<std::string, int64_t*> sizes = {{"format", &format}, {"rows", &rows},     {"chunk", &chunk},
                                             {"limit", &limit},   {"slack", &slack},   {"vocab", &vocab},
                                             {"states", &states}, {"source", &source}, {"source_vocab", &source_vocab},
                                             {"slots", &slots},   {"source_least", &source_least}};
    std::string line, what;
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      words >> what;
      if (sizes.count(what)) words >> *sizes[what];
      else if (what == "device") words >> device;
      else if (what == "features") {
        reads_features = true;
        words >> what;
        features_dtype = dtype_of(what);
        for (int64_t size; words >> size;) features.push_back(size);
      }
      else if (what == "ring") { rings.emplace_back(); words >> rings.back().first >> rings.back().second; }
      else if (what == "eos" || what == "start") for (int64_t id; words >> id;) (what == "eos" ? eos : start).push_back(id);
      else if (what == "file") {
        int64_t size;
        uint32_t crc;
        words >> what >> size >> std::hex >> crc;
        if (what == "weights.bin") blob = read_weights(size, crc);
        else check_file(what, size, crc);
      }
      else if (what == "program") { words >> what; load(what); }
      else add_tensor(what == "weight", words, blob);
    }
    lengths.assign(rows, 0);
    next.assign(rows, -1);
    sourced.assign(rows, source == 0);
  }

  // Appends ids to each row; an empty list leaves a row as it is. Prompts longer than `chunk` take several calls.
  void feed(const std::vector<Row>& ids) {
    check_rows(ids.size(), "lists of ids");
    size_t longest = 0;
    for (int64_t row = 0; row < rows; ++row) {
      check_ids(row, ids[row], vocab);
      check_room(row, ids[row].size());
      if (!ids[row].empty() && !sourced[row])
        throw std::runtime_error("row " + std::to_string(row) + " has no source: call encode before its first token");
      longest = std::max(longest, ids[row].size());
    }
    for (size_t done = 0; done < longest; done += chunk) {
      std::vector<Row> piece(rows);
      for (int64_t row = 0; row < rows; ++row) {
        size_t begin = std::min(done, ids[row].size()), end = std::min(done + chunk, ids[row].size());
        piece[row].assign(ids[row].begin() + begin, ids[row].begin() + end);
      }
      auto [padded, counts] = pad(piece, 1);
      step(padded.size(1) == 1 ? "decode" : "prefill", padded, counts);
    }
  }

  // Feeds `next` to each row that holds tokens and has not ended. -> how many rows that was
  int64_t decode() {
    std::vector<Row> ids(rows);
    int64_t live = 0;
    for (int64_t row = 0; row < rows; ++row) {
      if (next[row] < 0 || std::count(eos.begin(), eos.end(), next[row])) continue;
      check_room(row, 1);
      ids[row] = {next[row]};
      ++live;
    }
    if (live) {
      auto [padded, counts] = pad(ids, 1);
      step("decode", padded, counts);
    }
    return live;
  }

  // Runs the encoder over the ids of each row's source; a row whose list is empty keeps the source that it has.
  void encode(const std::vector<Row>& ids) {
    check_source();
    if (reads_features) throw std::runtime_error("the source of this model is features, a tensor, and not ids");
    check_rows(ids.size(), "sources");
    for (int64_t row = 0; row < rows; ++row) check_ids(row, ids[row], source_vocab);
    auto [padded, counts] = pad(ids, 0);
    attach(padded, counts);
  }

  // Runs the encoder over features [rows, ..., frames], such as a log-mel spectrogram, of which each row has counts[row].
  void encode(const at::Tensor& given, const Row& counts) {
    check_source();
    if (!reads_features) throw std::runtime_error("the source of this model is not features");
    check_rows(counts.size(), "counts");
    std::vector<int64_t> expected = {rows};
    expected.insert(expected.end(), features.begin(), features.end());
    expected.push_back(given.dim() ? given.size(-1) : 0);
    if (given.sizes() != at::IntArrayRef(expected))
      throw std::runtime_error("features have the shape " + c10::str(given.sizes()) + ", and the program takes " +
                               c10::str(at::IntArrayRef(expected)));
    for (int64_t count : counts)
      if (count < 0 || count > given.size(-1))
        throw std::runtime_error("a row cannot have " + std::to_string(count) + " of " + std::to_string(given.size(-1)) +
                                 " features");
    attach(given.to(features_dtype), at::tensor(counts, at::kLong));
  }

  // How many tokens a row can be rewound by.
  int64_t rewindable(int64_t row) const {
    int64_t most = lengths[row], written = tensors.at("clock_written")[row].item<int64_t>();
    for (auto [slots, keep] : rings)
      if (written - keep > slots)  // older tokens were overwritten
        most = std::min(most, std::max<int64_t>(0, std::min(slack, slack + 1 - (written - lengths[row]))));
    if (states) most = std::min(most, lengths[row] - tensors.at("clock_base")[row].item<int64_t>());
    return most;
  }

  // Drops the last counts[row] tokens of each row. Feed the row something before the next `decode`.
  void rewind(const Row& counts) {
    check_rows(counts.size(), "counts");
    for (int64_t row = 0; row < rows; ++row) {
      int64_t most = rewindable(row);
      if (counts[row] >= 0 && counts[row] <= most) continue;
      throw std::runtime_error("row " + std::to_string(row) + " cannot be rewound by " + std::to_string(counts[row]) + ": " +
                               std::to_string(most) + " of its tokens can be dropped. Export with a larger slack");
    }
    at::Tensor back = at::tensor(counts, at::kLong).to(device);
    if (programs.count("rewind")) run("rewind", {back});
    else tensors.at("clock_lengths").sub_(back);
    for (int64_t row = 0; row < rows; ++row) {
      lengths[row] -= counts[row];
      if (counts[row]) next[row] = -1;
    }
  }

  // Empties these rows, and their sources.
  void reset(const Row& which) {
    for (int64_t row : which) {
      if (row < 0 || row >= rows) throw std::runtime_error("there is no row " + std::to_string(row) + ": rows are 0 to " +
                                                                  std::to_string(rows - 1));
      for (auto& [name, tensor] : tensors)
        if (name.rfind("clock_", 0) == 0 || name.rfind("cache_", 0) == 0) tensor[row].zero_();
      lengths[row] = 0;
      next[row] = -1;
      sourced[row] = source == 0;
    }
  }

 private:
  std::filesystem::path folder;
  std::string device = "cpu";
  std::vector<bool> sourced;  // rows that have a source, or need none
  std::vector<std::pair<int64_t, int64_t>> rings;       // slots, kept first tokens
  std::unordered_map<std::string, at::Tensor> tensors;  // weights and cache, by name
  std::unordered_map<std::string, std::string> described;  // name -> dtype and shape in words
  std::map<std::string, std::unique_ptr<torch::inductor::AOTIModelPackageLoader>> programs;

  // The lines of tensors.txt, once its checksum and its version are known to be right.
  std::string read_description() const {
    std::ifstream file(folder / "tensors.txt", std::ios::binary);
    if (!file) throw std::runtime_error(folder.string() + " has no tensors.txt: export with the target aotinductor");
    std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    auto end = text.rfind("checksum ");
    uint32_t expected = 0;
    if (end == std::string::npos || !(std::istringstream(text.substr(end + 9)) >> std::hex >> expected) ||
        crc32(text.data(), end) != expected)
      throw altered("tensors.txt");
    std::istringstream first(text);
    std::string word;
    int64_t version = 0;
    first >> word >> version;
    if (word != "format" || version != FORMAT)
      throw std::runtime_error(folder.string() + " has version " + std::to_string(version) + " of the format, and this " +
                               "program reads " + std::to_string(FORMAT) + ": export the model again");
    return text.substr(0, end);
  }

  std::runtime_error altered(const std::string& name) const {
    return std::runtime_error(name + " in " + folder.string() + " was altered or cut short: export the model again");
  }

  at::Tensor read_weights(int64_t size, uint32_t crc) {
    at::Tensor blob = at::empty({size}, at::kByte);
    if (device == "cpu") ask_for_huge_pages(blob);
    std::ifstream file(folder / "weights.bin", std::ios::binary);
    auto data = static_cast<char*>(blob.data_ptr());
    if (!file.read(data, size) || file.peek() != EOF || crc32(data, size) != crc) throw altered("weights.bin");
    return blob;
  }

  void check_file(const std::string& name, int64_t size, uint32_t crc) const {
    std::ifstream file(folder / name, std::ios::binary);
    std::string data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (static_cast<int64_t>(data.size()) != size || crc32(data.data(), data.size()) != crc) throw altered(name);
  }

  // CRC-32 as zlib computes it, 8 bytes at a time.
  static uint32_t crc32(const char* data, size_t size) {
    static const auto tables = [] {
      std::array<std::array<uint32_t, 256>, 8> made{};
      for (uint32_t i = 0; i < 256; ++i) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0);
        made[0][i] = value;
      }
      for (int k = 1; k < 8; ++k)
        for (uint32_t i = 0; i < 256; ++i) made[k][i] = made[k - 1][i] >> 8 ^ made[0][made[k - 1][i] & 255];
      return made;
    }();
    auto bytes = reinterpret_cast<const unsigned char*>(data);
    uint32_t crc = ~0u;
    for (; size >= 8; size -= 8, bytes += 8) {
      uint32_t low = crc ^ (bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24);
      crc = tables[7][low & 255] ^ tables[6][low >> 8 & 255] ^ tables[5][low >> 16 & 255] ^ tables[4][low >> 24] ^
            tables[3][bytes[4]] ^ tables[2][bytes[5]] ^ tables[1][bytes[6]] ^ tables[0][bytes[7]];
    }
    for (; size; --size) crc = crc >> 8 ^ tables[0][(crc ^ *bytes++) & 255];
    return ~crc;
  }

  void check_source() const {
    if (!source) throw std::runtime_error("this model reads no source: only encoder-decoder models do");
  }

  // Runs the encoder, and notes which rows have a source now.
  void attach(const at::Tensor& given, const at::Tensor& counts) {
    if (given.size(-1) > source)
      throw std::runtime_error("the source is " + std::to_string(given.size(-1)) + " long, and the program was exported for " +
                               std::to_string(source) + ": export it with a larger source");
    at::Tensor padded = at::constant_pad_nd(given, {0, std::max<int64_t>(0, source_least - given.size(-1))});
    run("encode", {padded, counts});
    for (int64_t row = 0; row < rows; ++row)
      if (counts[row].item<int64_t>()) sourced[row] = true;
  }

  // Weights that are read for every token miss fewer addresses that way. Before they are written: later is too late.
  static void ask_for_huge_pages(const at::Tensor& blob) {
#ifdef __linux__
    constexpr uintptr_t page = 4096;
    auto begin = (reinterpret_cast<uintptr_t>(blob.data_ptr()) + page - 1) / page * page;
    auto end = (reinterpret_cast<uintptr_t>(blob.data_ptr()) + blob.nbytes()) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // refused: as without
#endif
  }

  void add_tensor(bool weight, std::istringstream& words, const at::Tensor& blob) {
    std::string name, dtype;
    int64_t offset = 0;
    std::vector<int64_t> shape;
    words >> name >> dtype >> offset;
    std::string& line = described[name] = dtype;
    for (int64_t size; words >> size;) {
      shape.push_back(size);
      line += " " + std::to_string(size);
    }
    auto type = dtype_of(dtype);
    if (!weight) {
      tensors[name] = at::zeros(shape, at::TensorOptions(type).device(device));
      return;
    }
    int64_t bytes = c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(type));
    if (offset + bytes > blob.numel()) throw std::runtime_error(name + " ends after the end of weights.bin: export the model again");
    tensors[name] = blob.slice(0, offset, offset + bytes).view(type).view(shape).to(device);
  }

  void load(const std::string& name) {
    auto path = folder / "programs" / (name + ".pt2");
    auto program = std::make_unique<torch::inductor::AOTIModelPackageLoader>(path.string(), "model");
    std::unordered_map<std::string, at::Tensor> needed;
    auto compiled_for = program->get_metadata();  // dtype and shape by name: the library checks neither
    for (const auto& constant : program->get_constant_fqns()) {
      auto found = tensors.find(constant);
      if (found == tensors.end() || described[constant] != compiled_for[constant])
        throw std::runtime_error("tensors.txt has no " + constant + " as program " + name + " needs it (" +
                                 compiled_for[constant] + "): export the model again");
      needed[constant] = found->second;
    }
    program->load_constants(needed, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
    programs[name] = std::move(program);
  }

  std::vector<at::Tensor> run(const std::string& name, const std::vector<at::Tensor>& inputs) {
    c10::AutoGradMode no_gradients(false);
    std::vector<at::Tensor> placed;
    for (const auto& input : inputs) placed.push_back(input.to(device));
    return programs.at(name)->run(placed);
  }

  // ids [rows, T], of which each row has counts [rows]
  void step(const std::string& name, const at::Tensor& ids, const at::Tensor& counts) {
    std::vector<at::Tensor> inputs = {ids, counts};
    const int64_t* fed = counts.data_ptr<int64_t>();
    int64_t longest = slots;
    for (int64_t row = 0; row < rows; ++row) longest = std::max(longest, lengths[row] + fed[row]);
    if (slots) inputs.push_back(at::empty({longest}, at::TensorOptions(at::kChar).device(device)));
    at::Tensor chosen = run(name, inputs)[0].to(at::kCPU);
    for (int64_t row = 0; row < rows; ++row) {
      lengths[row] += fed[row];
      if (fed[row]) next[row] = chosen.data_ptr<int64_t>()[row];
    }
  }

  std::pair<at::Tensor, at::Tensor> pad(const std::vector<Row>& ids, size_t longest) const {
    for (const auto& row : ids) longest = std::max(longest, row.size());
    at::Tensor padded = at::zeros({rows, static_cast<int64_t>(longest)}, at::kLong), counts = at::zeros({rows}, at::kLong);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy(ids[row].begin(), ids[row].end(), padded.data_ptr<int64_t>() + row * longest);
      counts.data_ptr<int64_t>()[row] = ids[row].size();
    }
    return {padded, counts};
  }

  void check_rows(size_t given, const std::string& what) const {
    if (static_cast<int64_t>(given) != rows)
      throw std::runtime_error(std::to_string(given) + " " + what + " were given, and the program has " +
                               std::to_string(rows) + " rows");
  }

  static void check_ids(int64_t row, const Row& ids, int64_t most) {
    for (int64_t id : ids)
      if (id < 0 || id >= most)
        throw std::runtime_error("row " + std::to_string(row) + " has the id " + std::to_string(id) + ": ids are 0 to " +
                                 std::to_string(most - 1));
  }

  void check_room(int64_t row, int64_t more) const {
    if (limit && lengths[row] + more > limit)
      throw std::runtime_error("row " + std::to_string(row) + " holds " + std::to_string(lengths[row]) + " tokens and " +
                               std::to_string(more) + " more were given, but the program has room for " +
                               std::to_string(limit) + ": export it with a larger capacity");
  }
};
