// Greedy decoding of an exported model in C++ (program.h). Reads commands, one on each line of standard input:
//
//     decode FOLDER
//     feed 1,2,3 4,5      appends ids to each row; - leaves a row as it is
//     decode 20           appends the most likely id to each row, 20 times or until the row ends; prints a line a row
//     rewind 3 0          drops the last tokens of each row
//     reset 0 1           empties rows; all of them if none is given
//     encode 7,8 9        attaches a source to each row of an encoder-decoder model
//
// The speed of each `decode` is written to standard error.

#include <chrono>
#include <iostream>

#include "program.h"

static Row ids_of(const std::string& word) {
  Row ids;
  std::istringstream parts(word);
  if (word != "-")
    for (std::string part; std::getline(parts, part, ',');) ids.push_back(std::stoll(part));
  return ids;
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
