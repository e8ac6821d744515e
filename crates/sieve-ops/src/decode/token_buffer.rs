//! Buffers that a cache adds tokens to.
//!
//! A buffer has one owner, so kernels write to it in place; cloning it copies it.
use crate::device::write_block;
use crate::tensors::{primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, DType, Float, Int, Tensor};
use burn_flex::Flex;
use std::any::Any;
use std::fmt;

/// A full buffer gets room for one more token per `ROOM_SHARE` that it holds, and for at least `LEAST_ROOM`. Memory
/// plans do not count this room.
const LEAST_ROOM: usize = 256;
const ROOM_SHARE: usize = 16;

/// Which rows of the batch a copied buffer has.
#[derive(Clone, Copy, Debug)]
pub enum RowsOf {
    /// This many copies of each row.
    Copies(usize),
    /// Rows for texts of at most `tokens` tokens each, contents undefined. The buffer counts all of its room as in use.
    Texts {
        /// Number of rows of the new buffer.
        rows: usize,
        /// Most tokens of a text.
        tokens: usize,
    },
    /// A copy of one row of [`Texts`](Self::Texts).
    Text {
        /// Index of the copied row.
        row: usize,
        /// Number of tokens of the row's text.
        tokens: usize,
    },
    /// A copy of what a text of one token would have in a row of [`Texts`](Self::Texts), without room for more. It is
    /// all that a step overwrites in a row that it takes as free.
    First {
        /// Index of the row.
        row: usize,
    },
}

/// Tokens along one axis of a contiguous buffer with room for more, so that most additions do not copy earlier tokens.
///
/// Kernels write to the buffer in place, so that a clone copies it.
pub struct TokenBuffer<B: Backend, const D: usize, K: BasicOps<B> = Float> {
    /// `None` only inside [`write`](Self::write), which moves the tensor out and puts another one back.
    buffer: Option<Tensor<B, D, K>>,
    axis: usize,
    len: usize,
}

impl<B: Backend, const D: usize, K: BasicOps<B> + 'static> TokenBuffer<B, D, K> {
    /// These tokens along `axis`, in a buffer of `room` tokens; `None`: with some spare room.
    pub fn new(tokens: Tensor<B, D, K>, axis: usize, room: Option<usize>) -> Self {
        let mut shape = tokens.dims();
        shape[axis] = room.unwrap_or(shape[axis] + spare_room(shape[axis]));
        let mut new = Self::empty(shape, axis, (&tokens.device(), tokens.dtype()));
        new.append(tokens);
        new
    }

    /// A buffer of this shape without a token.
    pub fn empty(shape: [usize; D], axis: usize, options: (&B::Device, DType)) -> Self {
        // A CUDA tensor of several dimensions may have gaps between its rows; one of a single dimension has none.
        let buffer = Tensor::<B, 1, K>::empty([shape.iter().product::<usize>()], options);
        Self { buffer: Some(buffer.reshape(shape)), axis, len: 0 }
    }

    /// Tokens in use; they come first in the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token of the buffer is in use.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of tokens that the buffer can hold.
    pub fn room(&self) -> usize {
        self.buffer().dims()[self.axis]
    }

    /// The whole buffer, unused tokens included.
    pub fn buffer(&self) -> &Tensor<B, D, K> {
        self.buffer.as_ref().expect("a write puts the buffer back")
    }

    /// The tokens in use, without a copy.
    pub fn tokens(&self) -> Tensor<B, D, K> {
        self.buffer().clone().narrow(self.axis, 0, self.len)
    }

    /// Appends tokens after those in use.
    pub fn append(&mut self, tokens: Tensor<B, D, K>) {
        let new = tokens.dims()[self.axis];
        self.reserve(new, self.len);
        let mut first = [0; D];
        first[self.axis] = self.len;
        self.write(|buffer| with_block(buffer, first, tokens));
        self.len += new;
    }

    /// Counts tokens that a kernel has written after the others.
    pub fn count(&mut self, new: usize) {
        self.len += new;
    }

    /// Makes room for `new` more tokens. If that takes another buffer, only the last `kept` tokens are copied to it.
    pub fn reserve(&mut self, new: usize, kept: usize) {
        let first = 0;
        self.reserve_ends(new, [first, kept]);
    }

    /// Makes room for `new` more tokens. If that takes another buffer, only the `first` tokens in use and the `last`
    /// are copied to it.
    pub fn reserve_ends(&mut self, new: usize, [first, last]: [usize; 2]) {
        if self.len + new <= self.room() {
            return;
        }
        let first = first.min(self.len);
        let last = last.min(self.len - first);
        let kept = first + last;
        let mut moved = self.empty_like(self.buffer().dims()[0], kept + new + spare_room(kept));
        for (from, count) in [(0, first), (self.len - last, last)] {
            if count > 0 {
                moved.append(self.buffer().clone().narrow(self.axis, from, count));
            }
        }
        *self = moved;
    }

    /// A new buffer with the rows of the batch that `rows` names. `size(tokens)` is the number of entries that a text
    /// of `tokens` tokens has in this buffer, and the room for them.
    pub fn rows(&self, rows: RowsOf, size: impl Fn(usize) -> [usize; 2]) -> Self {
        match rows {
            RowsOf::Copies(rows) => self.copy_of_last(self.len, self.room(), rows),
            RowsOf::Texts { rows, tokens } => {
                let [_, room] = size(tokens);
                let mut texts = self.empty_like(rows, room.max(1));
                texts.count(room.max(1));
                texts
            }
            RowsOf::Text { row, tokens } => self.first_of_row(row, size(tokens)),
            RowsOf::First { row } => {
                let [len, _] = size(1);
                self.first_of_row(row, [len; 2])
            }
        }
    }

    /// A copy of the first `len` entries of a row, with this room.
    fn first_of_row(&self, row: usize, [len, room]: [usize; 2]) -> Self {
        let mut first = self.empty_like(1, room.max(1));
        if len > 0 {
            first.append(self.buffer().clone().narrow(0, row, 1).narrow(self.axis, 0, len));
        }
        first
    }

    /// Writes the entries of `text`, a buffer of one row, into row `row` of this buffer of [`RowsOf::Texts`], where the
    /// last becomes entry `end - 1`. No other tensor shares the buffer, so it is written in place and keeps its
    /// address.
    pub fn put(&mut self, row: usize, text: &Self, end: usize) {
        let first = 0;
        self.put_ends(row, text, first, end);
    }

    /// As [`put`](Self::put), but the `first` entries of `text` become the row's first ones.
    pub fn put_ends(&mut self, row: usize, text: &Self, first: usize, end: usize) {
        let first = first.min(text.len);
        let rest = text.len - first;
        for (from, count, to) in [(0, first, 0), (first, rest, end - rest)] {
            if count > 0 {
                let mut at = [0; D];
                at[0] = row;
                at[self.axis] = to;
                let entries = text.buffer().clone().narrow(self.axis, from, count);
                self.write(|buffer| with_block(buffer, at, entries));
            }
        }
    }

    /// A copy of the last `kept` tokens in a buffer with this room, each row `rows` times.
    fn copy_of_last(&self, kept: usize, room: usize, rows: usize) -> Self {
        let mut moved = self.empty_like(rows * self.buffer().dims()[0], room);
        if kept > 0 {
            let kept = self.buffer().clone().narrow(self.axis, self.len - kept, kept);
            moved.append(match rows {
                1 => kept,
                _ => kept.repeat_dim(0, rows),
            });
        }
        moved
    }

    /// A buffer without a token, of this number of rows and this room.
    fn empty_like(&self, rows: usize, room: usize) -> Self {
        let (old, mut shape) = (self.buffer(), self.buffer().dims());
        shape[0] = rows;
        shape[self.axis] = room;
        Self::empty(shape, self.axis, (&old.device(), old.dtype()))
    }

    /// Replaces the buffer by what `write` returns. `write` owns the buffer, so that the backend may change it in
    /// place.
    pub(super) fn write(&mut self, write: impl FnOnce(Tensor<B, D, K>) -> Tensor<B, D, K>) {
        let buffer = self.buffer.take().expect("a write puts the buffer back");
        self.buffer = Some(write(buffer));
    }
}

/// `buffer` with `values` from entry `first` of each dimension on. On the CPU this writes in place if the buffer has no
/// other handle.
fn with_block<B: Backend, const D: usize, K: BasicOps<B> + 'static>(
    buffer: Tensor<B, D, K>,
    first: [usize; D],
    values: Tensor<B, D, K>,
) -> Tensor<B, D, K> {
    let mut pair = [buffer, values];
    let any: &mut dyn Any = &mut pair;
    if let Some([buffer, values]) = any.downcast_mut::<[Tensor<Flex, D>; 2]>() {
        let old = std::mem::replace(buffer, values.clone());
        *buffer = tensor(write_block(primitive(old), first, primitive(values.clone())));
    } else if let Some([buffer, values]) = any.downcast_mut::<[Tensor<Flex, D, Int>; 2]>() {
        let old = std::mem::replace(buffer, values.clone()).into_primitive();
        *buffer = Tensor::from_primitive(write_block(old, first, values.clone().into_primitive()));
    } else {
        let size = pair[1].dims();
        let [buffer, values] = pair;
        let ranges: [_; D] = std::array::from_fn(|dim| first[dim]..first[dim] + size[dim]);
        return buffer.slice_assign(ranges, values);
    }
    let [buffer, _] = pair;
    buffer
}

/// Room for new tokens that a buffer of `len` tokens gets.
fn spare_room(len: usize) -> usize {
    LEAST_ROOM.max(len / ROOM_SHARE)
}

impl<B: Backend, const D: usize, K: BasicOps<B> + 'static> Clone for TokenBuffer<B, D, K> {
    fn clone(&self) -> Self {
        self.copy_of_last(self.len, self.room(), 1)
    }
}

impl<B: Backend, const D: usize, K: BasicOps<B> + 'static> fmt::Debug for TokenBuffer<B, D, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = self.buffer().dims();
        write!(f, "TokenBuffer({} tokens of {shape:?}, axis {})", self.len, self.axis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Distribution, TensorData};
    use burn_flex::FlexDevice;

    fn data<const D: usize>(x: Tensor<Flex, D>) -> TensorData {
        x.into_data()
    }

    fn address<const D: usize>(buffer: &TokenBuffer<Flex, D>) -> *const u8 {
        primitive(buffer.buffer().clone()).bytes().as_ptr()
    }

    #[test]
    fn tokens_are_not_copied_until_the_buffer_is_full_and_a_clone_has_a_buffer_of_its_own() {
        let (prompt, len) = (5, 700);
        for axis in [1, 2] {
            let mut shape = [2, 3, 3, 4];
            shape[axis] = len;
            let all = Tensor::<Flex, 4>::random(shape, Distribution::Default, &FlexDevice);
            let part = |first: usize, count: usize| all.clone().narrow(axis, first, count);
            let mut buffer = TokenBuffer::new(part(0, prompt), axis, None);
            let mut grown = 0;
            while buffer.len() < len {
                let (at, room) = (buffer.len(), buffer.room());
                let count = (len - at).min(if at % 7 == 0 { 3 } else { 1 });
                let mut other = buffer.clone();
                other.append(part(0, count));
                let before = address(&buffer);
                buffer.append(part(at, count));
                assert_eq!(address(&buffer) == before, buffer.room() == room);
                assert_eq!([buffer.len(), other.len()], [at + count; 2]);
                assert_eq!(data(buffer.tokens()), data(part(0, at + count)));
                assert_eq!(data(other.tokens().narrow(axis, at, count)), data(part(0, count)));
                grown += usize::from(buffer.room() != room);
            }
            assert_eq!(grown, 2, "a buffer with room is not copied");
            let buffer = buffer.rows(RowsOf::Copies(2), |n| [n; 2]);
            assert_eq!(data(buffer.tokens()), data(all.clone().repeat_dim(0, 2)));
        }
    }

    #[test]
    fn a_buffer_without_a_token_is_copied_repeated_and_made_larger() {
        let mut buffer = TokenBuffer::<Flex, 2>::empty([1, 2], 1, (&FlexDevice, DType::F32));
        buffer = buffer.rows(RowsOf::Copies(3), |n| [n; 2]);
        let mut other = buffer.clone();
        other.reserve(5, 0);
        assert_eq!((buffer.buffer().dims(), buffer.len()), ([3, 2], 0));
        assert!(other.is_empty() && other.room() >= 5);
        let all = Tensor::<Flex, 2>::random([3, 7], Distribution::Default, &FlexDevice);
        buffer.append(all.clone());
        assert_eq!(data(buffer.tokens()), data(all));
    }

    #[test]
    fn a_text_in_a_row_of_several_comes_back_as_it_was() {
        let all = Tensor::<Flex, 3>::random([1, 2, 9], Distribution::Default, &FlexDevice);
        let text = |first, len| TokenBuffer::new(all.clone().narrow(2, first, len), 2, None);
        let texts = RowsOf::Texts { rows: 3, tokens: 9 };
        let mut rows = text(0, 4).rows(texts, |n| [n; 2]);
        assert_eq!((rows.buffer().dims(), rows.len()), ([3, 2, 9], 9));
        // The second text has lost its first five tokens.
        rows.put(2, &text(0, 4), 4);
        rows.put(0, &text(5, 3), 8);
        rows.put(1, &TokenBuffer::empty([1, 2, 1], 2, (&FlexDevice, DType::F32)), 0);
        let taken = |row, tokens| rows.rows(RowsOf::Text { row, tokens }, |n| [n; 2]).tokens();
        assert_eq!(data(taken(2, 4)), data(all.clone().narrow(2, 0, 4)));
        let first = rows.rows(RowsOf::First { row: 2 }, |n| [2 * n, 9]);
        assert_eq!((data(first.tokens()), first.room()), (data(all.clone().narrow(2, 0, 2)), 2));
        assert!(rows.rows(RowsOf::First { row: 2 }, |n| [n / 2, 9]).is_empty());
        assert_eq!(data(taken(0, 8).narrow(2, 5, 3)), data(all.narrow(2, 5, 3)));
    }

    #[test]
    fn a_larger_buffer_gets_the_last_tokens_alone() {
        let all = Tensor::<Flex, 2>::random([1, 300], Distribution::Default, &FlexDevice);
        let mut buffer = TokenBuffer::new(all.clone().narrow(1, 0, 5), 1, Some(6));
        buffer.reserve(1, 3);
        assert_eq!((buffer.len(), buffer.room()), (5, 6));
        buffer.reserve(2, 3);
        assert_eq!(data(buffer.tokens()), data(all.clone().narrow(1, 2, 3)));
        assert!(buffer.room() >= 5);
        let mut buffer = TokenBuffer::new(all.clone().narrow(1, 0, 9), 1, Some(9));
        buffer.reserve_ends(1, [2, 3]);
        let ends =
            |first, last| Tensor::cat(vec![all.clone().narrow(1, 0, first), all.clone().narrow(1, 9 - last, last)], 1);
        assert_eq!(data(buffer.tokens()), data(ends(2, 3)));
        // Both ends go to their places in a row of a text of nine tokens.
        let mut rows = buffer.rows(RowsOf::Texts { rows: 2, tokens: 12 }, |n| [n; 2]);
        rows.put_ends(1, &buffer, 2, 9);
        let taken = rows.rows(RowsOf::Text { row: 1, tokens: 9 }, |n| [n; 2]).tokens();
        assert_eq!(data(taken.clone().narrow(1, 0, 2)), data(all.clone().narrow(1, 0, 2)));
        assert_eq!(data(taken.narrow(1, 6, 3)), data(all.narrow(1, 6, 3)));
    }
}
