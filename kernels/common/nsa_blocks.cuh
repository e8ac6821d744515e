// nsa_blocks: where the compressed blocks of native sparse attention lie. They are counted from each document's first
// token: block c of a document covers its tokens [c stride, c stride + size), and has slot ceil(document
// start / stride) + c of the row.
#pragma once
#include "common/types.cuh"

struct CompressedBlocks {
  const i32 *doc_start, *doc_end;  // of the row
  int size, stride;

  DEVICE int first_slot(int document_start) const { return ceil_div(document_start, stride); }
  // First token of the block in a slot; -1 where the slot is empty. A block in a slot begins less than a stride before
  // token `slot * stride`, and is at least a stride long: it reaches that token, so both are of one document.
  DEVICE int start(int slot) const {
    const int token = slot * stride, document = doc_start[token],
              first = document + (slot - first_slot(document)) * stride;
    return first + size <= doc_end[token] ? first : -1;
  }
  // Slot of the block that ends with a token; -1 where none does.
  DEVICE int slot_ending_at(int token) const {
    const int document = doc_start[token], offset = token + 1 - document - size;
    return offset >= 0 && offset % stride == 0 ? first_slot(document) + offset / stride : -1;
  }
  // Blocks of a document that end with `token` or before.
  DEVICE int num_seen(int token, int document_start) const {
    const int offset = token + 1 - document_start - size;
    return offset < 0 ? 0 : offset / stride + 1;
  }
};
