//! How a flattened tensor is divided among ranks.
use std::ops::Range;

/// A piece is a whole number of units, except that the last one also gets the remainder. So each piece of bf16 values
/// begins at a multiple of 256 bytes, as kernels require.
const UNIT: usize = 128;

/// A flattened tensor divided into one contiguous piece for each rank, in their order, as equal as units of 128
/// elements allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    len: usize,
    size: usize,
}

impl Pieces {
    /// Divides `len` elements among `size` ranks; `None` for a single rank, or too few elements for a unit on each.
    pub fn new(len: usize, size: usize) -> Option<Self> {
        (size > 1 && len / UNIT >= size).then_some(Self { len, size })
    }

    /// Range of the tensor's elements that a rank holds.
    pub fn of(&self, rank: usize) -> Range<usize> {
        self.start(rank)..self.start(rank + 1)
    }

    /// First element of a rank's piece. For `rank == size` the end of the last piece, which has the remainder.
    fn start(&self, rank: usize) -> usize {
        if rank == self.size { self.len } else { self.len / UNIT * rank / self.size * UNIT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_tensor_once_and_begin_at_a_unit() {
        let sizes = (0..700).chain([4096, 5000, 50_280 * 2048, 50_304 * 768, 1 << 33]);
        for len in sizes {
            for size in 1..=64 {
                let Some(pieces) = Pieces::new(len, size) else {
                    assert!(size == 1 || len < size * UNIT, "{len} among {size}");
                    continue;
                };
                let mut end = 0;
                let (mut least, mut most) = (usize::MAX, 0);
                for rank in 0..size {
                    let piece = pieces.of(rank);
                    assert_eq!(piece.start, end, "{len} among {size}");
                    assert!(piece.start.is_multiple_of(UNIT));
                    least = least.min(piece.len());
                    most = most.max(piece.len());
                    end = piece.end;
                }
                assert_eq!(end, len);
                assert!(least >= UNIT && most < least + 2 * UNIT, "{len} among {size}");
            }
        }
    }

    #[test]
    fn pieces_among_some_ranks_cover_each_piece_among_others() {
        for len in [1024, 5000, 50_280 * 48] {
            for (before, now) in (2..=8).flat_map(|n| (2..=8).map(move |m| (n, m))) {
                let (before_pieces, now_pieces) = (Pieces::new(len, before), Pieces::new(len, now));
                let (before_pieces, now_pieces) = (before_pieces.unwrap(), now_pieces.unwrap());
                for rank in 0..now {
                    let wanted = now_pieces.of(rank);
                    let parts = (0..before).flat_map(|rank| {
                        let piece = before_pieces.of(rank);
                        piece.start.max(wanted.start)..piece.end.min(wanted.end)
                    });
                    assert!(parts.eq(wanted.clone()), "{len}: {before} to {now}");
                }
            }
        }
    }
}
