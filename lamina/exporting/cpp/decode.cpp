// Greedy decoding of an exported model in C++ (program.h). Reads commands, one on each line of standard input:
//
//     decode FOLDER
//     feed 1,2,3 4,5      appends ids to each row; - leaves a row as it is
//     decode 20           appends the most likely id to each row, 20 times or until the row ends; prints a line a row
//     rewind 3 0          drops the last tokens of each row
//     reset 0 1           empties rows; all of them if none is given
//     encode 7,8 9        attaches a source to each row of an encoder-decoder model
//     features FILE 7 9   the same for features: FILE has [rows, ..., frames] in the model's dtype, of which rows have 7 and 9
//
// The speed of each `decode` is written to standard error.

#include <chrono>
#include <iostream>

#include "program.h"

static int64_t number_of(const std::string& word) {
  size_t used = 0;
  int64_t found = 0;
  try {
    found = std::stoll(word, &used);
  } catch (const std::exception&) {
  }
  if (!used || used != word.size()) throw std::runtime_error("'" + word + "' is not a number");
  return found;
}

static Row ids_of(const std::string& word) {
  Row ids;
  std::istringstream parts(word);
  if (word != "-")
    for (std::string part; std::getline(parts, part, ',');) ids.push_back(number_of(part));
  return ids;
}

static void encode_file(Program& program, const std::vector<std::string>& words) {
  Row counts;
  for (size_t i = 1; i < words.size(); ++i) counts.push_back(number_of(words[i]));
  std::ifstream file(words.empty() ? "" : words[0], std::ios::binary);
  if (!file) throw std::runtime_error("there is no file " + (words.empty() ? "after `features`" : words[0]));
  std::string data((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<int64_t> shape = {program.rows};
  shape.insert(shape.end(), program.features.begin(), program.features.end());
  shape.push_back(-1);
  int64_t frame = -c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(program.features_dtype));
  if (data.size() % frame)
    throw std::runtime_error(words[0] + " has " + std::to_string(data.size()) + " bytes, and a frame of all rows " +
                             std::to_string(frame));
  program.encode(at::from_blob(data.data(), {static_cast<int64_t>(data.size())}, at::kByte)
                     .view(program.features_dtype).view(shape), counts);
}

static void decode(Program& program, int64_t most) {
  std::vector<Row> made(program.rows);
  auto begin = std::chrono::steady_clock::now();
  int64_t steps = 0;
  for (; steps < most; ++steps) {
    Row before = program.next, lengths = program.lengths;
    if (!program.decode()) break;
    for (int64_t row = 0; row < program.rows; ++row)
      if (program.lengths[row] > lengths[row]) made[row].push_back(before[row]);
  }
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  for (int64_t row = 0; row < program.rows; ++row) {  // an id that ends a row is printed and not fed
    bool ended = std::count(program.eos.begin(), program.eos.end(), program.next[row]);
    if (ended && static_cast<int64_t>(made[row].size()) < most) made[row].push_back(program.next[row]);
    for (size_t i = 0; i < made[row].size(); ++i) std::cout << (i ? " " : "") << made[row][i];
    std::cout << "\n";
  }
  std::cout << std::flush;
  std::cerr << steps / took.count() << " steps/s\n";
}

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::cerr << "usage: decode FOLDER < COMMANDS\n";
    return 2;
  }
  Program program(argv[1]);
  for (std::string line, command; std::getline(std::cin, line);) {
    std::istringstream stream(line);
    if (!(stream >> command)) continue;
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    if (command == "features") {
      encode_file(program, words);
      continue;
    }
    std::vector<Row> ids;
    Row numbers;
    for (const auto& word : words) ids.push_back(ids_of(word));
    for (const auto& row : ids)
      if (row.size() == 1) numbers.push_back(row[0]);
    if (command == "feed") program.feed(ids);
    else if (command == "encode") program.encode(ids);
    else if (command == "decode" && numbers.size() == 1) decode(program, numbers[0]);
    else if (command == "rewind") program.rewind(numbers);
    else if (command == "reset") {
      if (numbers.empty()) for (int64_t row = 0; row < program.rows; ++row) numbers.push_back(row);
      program.reset(numbers);
    } else throw std::runtime_error("unknown command: " + line);
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "decode: " << error.what() << "\n";
  return 1;
}
