// nsa_rows: the query rows that chose a block of keys, as tiles of attention kernels: a row is a query and a head of
// the group, a query's heads side by side.
#pragma once
#include "common/types.cuh"

// A row of a tile, in shared memory. Past the end of a list the token is -1 and the row is zeros.
struct alignas(16) ChosenRow {
  int token, head;  // head: index among all query heads
  int part;         // row of the choice's output, or gradient of q
};

// The queries of an item that are of one document: they chose one block.
struct ChosenRun {
  const int2* entries;   // {token, choice}
  int num_rows;          // entries * group
  int first_key, end_key;  // keys of the block
};

// The run that begins at entry `first` of `count`; `next` receives the index of the entry after it. `cell`: the cell of
// select_size positions where the block begins.
DEVICE ChosenRun chosen_run(const int2* entries, int first, int count, int cell, int select_size, int group,
                            const i32* doc_start, const i32* doc_end, int& next) {
  const int token = entries[first].x, start = doc_start[token], end = doc_end[token];
  next = count;
  if (entries[count - 1].x >= end) {  // a later document has a block in the same cell
    int low = first + 1;
    while (low < next) {
      const int middle = (low + next) / 2;
      if (entries[middle].x < end) low = middle + 1; else next = middle;
    }
  }
  ChosenRun run;
  run.entries = entries + first;
  run.num_rows = (next - first) * group;
  run.first_key = cell * select_size + start % select_size;
  run.end_key = min(run.first_key + select_size, end);
  return run;
}

// Row `row` of a run: the token and head of a query row, and the row of its part; past the run's end a row without a
// token.
DEVICE ChosenRow chosen_row(const ChosenRun& run, int row, int group, int first_head) {
  if (row >= run.num_rows) return {-1, first_head, 0};
  const int2 entry = run.entries[row / group];
  return {entry.x, first_head + row % group, entry.y * group + row % group};
}
