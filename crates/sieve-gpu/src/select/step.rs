//! Selection for one query in decoding: by the largest logits, or by upper bounds of the logits of each page (Quest).
use super::{Call, Choice, KeptBits, LongChoice, NAME};
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params};
use sieve_core::KeepBlocks;

/// Pages of keys that a thread block scores.
const PAGES_AT_ONCE: usize = 8;

/// Shared memory of select_choose beside its row of scores, rounded up.
const CHOOSE_STATIC_BYTES: usize = 1024;

impl Call<'_> {
    /// Marks the keys with the largest logits of each head.
    pub(super) fn largest_logits(&self, [kept, nan_rows]: KeptBits<'_>) -> Result<(), KernelError> {
        let s = self.selection;
        let KeepBlocks::Top(top) = s.keep.by else {
            return Err(self.not_one_query());
        };
        if s.shape.num_queries != 1 || s.scores.block != 1 {
            return Err(self.not_one_query());
        }
        let scores = self.logits(s.shape.num_keys - 1..s.shape.num_keys, 0..s.shape.num_heads)?;
        let tensors = [&scores, kept, nan_rows];
        let all = LongChoice::new(tensors, [0, s.shape.num_heads], s.shape.num_keys);
        LongChoice { top, ..all }.choose()
    }

    /// Marks the pages with the largest upper bounds. `bounds` already holds the minima and maxima of the first `known`
    /// pages; bounds of later pages are written.
    pub(super) fn pages(
        &self,
        bits: KeptBits<'_>,
        known: usize,
        bounds: Option<&CudaTensor>,
    ) -> Result<(), KernelError> {
        let s = self.selection;
        let [_, pages] = s.blocks();
        let d = self.shape.head_dim;
        let Some(bounds) = bounds.filter(|_| s.shape.num_queries == 1 && d.is_multiple_of(32)) else {
            return Err(self.not_one_query());
        };
        let [kv_heads, room, two, width] = bounds.dims(NAME, "bounds")?;
        operands!(only NAME, bounds: F32[kv_heads, room, two, width] contiguous);
        if [kv_heads, two, width] != [s.shape.num_kv_heads, 2, d] || room < pages {
            return Err(self.not_one_query());
        }
        let scores = self.new_f32(&[s.shape.num_heads, 1, pages]);
        let params = params!(SelectPagesParams {
            num_keys: s.shape.num_keys,
            page: s.scores.block,
            room,
            first_new: known,
            head_dim: d,
            group: s.shape.num_heads / s.shape.num_kv_heads,
            [q_offset, q_token_stride]: self.q,
            [k_offset, k_token_stride]: self.k,
        });
        let grid = [pages.div_ceil(PAGES_AT_ONCE), s.shape.num_kv_heads, 1];
        let tensors = [self.qkv.q.tensor(), self.qkv.k.tensor(), bounds, &scores];
        // SAFETY: bounds have room for every page, checked above; every score is written.
        unsafe { SELECT_PAGES.launch(grid, &tensors, &params) }?;
        let KeepBlocks::Top(top) = s.keep.by else {
            return Err(self.not_one_query());
        };
        // A row of scores that does not fit shared memory is read from global memory.
        if pages * DType::F32.size() + CHOOSE_STATIC_BYTES > scores.hardware().max_shared_bytes {
            let [kept, nan_rows] = bits;
            let all = LongChoice::new([&scores, kept, nan_rows], [0, s.shape.num_heads], pages);
            let drops_absent = true;
            return LongChoice {
                top,
                drops_absent,
                ..all
            }
            .choose();
        }
        self.choose(&Choice {
            scores: &scores,
            bits,
            first_head: 0,
            num_heads: s.shape.num_heads,
            keep: s.keep.by,
            is_mass: false,
            forced: false,
            drops_absent: true,
        })
    }

    /// The error for a selection other than a decoding step's.
    fn not_one_query(&self) -> KernelError {
        KernelError::unsupported(
            NAME,
            "selection",
            format!("{:?}", self.selection),
            "one query; blocks of one key, or bounds of every page of heads of 32, 64, ... 256 \
                columns",
        )
    }
}

pub(super) const SELECT_PAGES: SourceKernel = SourceKernel::new("select_pages").threads(32 * PAGES_AT_ONCE);

#[cfg(test)]
mod tests {
    use crate::{DType, Hardware, KernelError, Qkv, Recorder, Step};
    use sieve_core::{BlockScores, BlockSelection, CallShape, HeavyKeys, KeepBlocks, KeyScores, SlotOrder};

    /// Runs `selection` on packed heads. Returns the dynamic shared memory of each launch of `select_choose`, which is
    /// 0 where it reads scores from global memory.
    fn choose(selection: &BlockSelection) -> Result<Vec<usize>, KernelError> {
        let (gpu, shape) = (Recorder::new(Hardware::HOPPER), selection.shape);
        let heads = shape.num_heads + 2 * shape.num_kv_heads;
        let packed = gpu.tensor(&[1, shape.num_keys, heads, shape.head_dim], DType::BF16);
        let bounds = gpu.tensor(&[shape.num_kv_heads, shape.num_keys, 2, shape.head_dim], DType::F32);
        Qkv::packed(&packed, shape.num_heads, shape.num_kv_heads).select_blocks(selection, Some(&bounds))?;
        let steps = gpu.take_steps();
        let of_step = |step: &Step| match step {
            Step::Launch(launch) if launch.kernel.name() == "select_choose" => {
                Some(launch.kernel.dynamic_shared_bytes())
            }
            _ => None,
        };
        Ok(steps.iter().filter_map(of_step).collect())
    }

    #[test]
    fn a_row_of_pages_that_shared_memory_has_no_room_for_is_read_in_place() {
        for (num_keys, shared) in [(57_856, 57_856 * 4), (57_857, 0), (900_000, 0)] {
            let shape = CallShape::new([1, num_keys], [4, 2], 32);
            let selection = BlockSelection::new(shape, 1, BlockScores::Bounds(0), KeepBlocks::Top(7));
            assert_eq!(choose(&selection).expect("taken"), [shared], "{num_keys}");
        }
    }

    #[test]
    fn keys_of_a_long_prompt_are_kept_though_no_mask_of_them_has_room() {
        let shape = CallShape::new([126_334, 126_334], [6, 3], 64);
        let cells = BlockScores::Cells {
            stride: 1,
            reversed: false,
            norm: 1.0,
        };
        let selection = BlockSelection::new(shape, 1, cells, KeepBlocks::Top(1_000));
        let refused = choose(&selection).map_err(|error| error.to_string());
        assert!(refused.is_err_and(|text| text.contains("2^31")));
        let gpu = Recorder::new(Hardware::HOPPER);
        let packed = gpu.tensor(&[1, shape.num_keys, 12, 64], DType::BF16);
        let lse = gpu.tensor(&[1, 6, shape.num_keys], DType::F32);
        let heavy = HeavyKeys {
            selection,
            last: 1_000,
            width: 1,
            by_largest: false,
            slots: None,
        };
        let kept = Qkv::packed(&packed, 6, 3).keep_heavy_keys(&heavy, &lse).expect("kept");
        assert_eq!(kept.k.shape(), [1, 3, 2_000, 64]);
    }

    #[test]
    fn keys_are_ordered_by_attention_in_heads_that_its_kernel_takes() {
        for (head_dim, by_attention, fits) in [(64, true, true), (80, true, false), (80, false, true)] {
            let shape = CallShape::new([256, 256], [4, 2], head_dim);
            let means = BlockScores::Means { variances: 0.0 };
            let mut selection = BlockSelection::new(shape, 64, means, KeepBlocks::Mass(0.9));
            selection.order = Some(SlotOrder {
                segment: 128,
                keys: Some(if by_attention {
                    KeyScores::Attention(64)
                } else {
                    KeyScores::Length
                }),
                moves_queries: false,
                keeps_first: false,
            });
            let chosen = choose(&selection).map_err(|error| error.to_string());
            assert_eq!(chosen.is_ok(), fits, "{head_dim} {by_attention}: {chosen:?}");
            assert!(
                fits || chosen.is_err_and(|text| text.contains("head_dim 80")),
                "{head_dim}"
            );
        }
    }
}
