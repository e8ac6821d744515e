//! Probes: every gamma-th query has dense attention. It chooses blocks for its query tile (as in MOMO), and its dense
//! output corrects the sparse output of the queries after it.
//!
//! `correct_by_probes` computes the dense rows of a correction and adds them. MOMO's choice returns these rows: the
//! probes' attention stores the log-sum-exp of each block of keys beside its output (`BLOCK_LSE`).
use super::call::Call;
use super::choose::{Choice, KeptBits};
use crate::KernelError;
use crate::attention::{BlockLse, Qkv};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require};
use sieve_core::{BlockScores, CallShape, KeyMask, MaskPlaces, ProbeCorrection, Tiles};
use std::ops::Range;

/// Probes of a query tile, and keys of a key tile, in the dense attention of the probes.
const SIDE: usize = 128;

impl Call<'_> {
    /// Marks the blocks that the probes of each tile chose. Returns the probes' dense attention.
    pub(super) fn probes(&self, bits: KeptBits<'_>) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let BlockScores::Probes { gamma, .. } = s.scores.by else { unreachable!("the caller matched this variant") };
        let [_, num_blocks] = s.blocks();
        let num_probes = s.shape.num_queries.div_ceil(gamma);
        let words = num_blocks.div_ceil(u32::BITS as usize);
        let [kept, nan_rows] = bits;
        let chosen = kept.empty_contiguous(&[s.shape.num_heads, num_probes, words], DType::I32);
        let mask = probe_mask(s.shape, gamma, kept)?;
        let dense = self.qkv.new_sparse_output(&mask)?;
        for heads in self.slabs(self.heads(), num_probes * num_blocks * DType::F32.size()) {
            let lse = self.new_f32(&[heads.len(), num_blocks, num_probes]);
            let blocks = BlockLse { values: &lse, heads: heads.clone(), block: s.scores.block, gamma };
            let scale = s.scores.softmax_scale;
            self.qkv.sparse_attention_into(&mask, scale, &dense, Some(&blocks))?;
            self.gate(&lse, heads.clone(), &chosen, nan_rows)?;
            let scores = self.votes(&lse, heads.clone(), &chosen)?;
            self.choose(&Choice {
                scores: &scores,
                bits,
                heads,
                keep: s.keep.by,
                is_mass: false,
                forced: false,
                drops_absent: true,
            })?;
        }
        Ok(dense.o)
    }
}

impl Call<'_> {
    /// Marks in `chosen` the blocks that each probe of some heads chooses, by the log-sum-exps `lse` of its logits in
    /// each block, f32 `[heads, blocks, probes]`.
    fn gate(
        &self,
        lse: &CudaTensor,
        heads: Range<usize>,
        chosen: &CudaTensor,
        nan_rows: &CudaTensor,
    ) -> Result<(), KernelError> {
        let s = self.selection;
        let BlockScores::Probes { gamma, chosen: [k, num_exact] } = s.scores.by else { unreachable!("probes choose") };
        let [_, num_blocks] = s.blocks();
        let num_probes = s.shape.num_queries.div_ceil(gamma);
        let params = params!(SelectGateParams {
            num_probes,
            num_blocks,
            block: s.scores.block,
            context: s.shape.context(),
            gamma,
            query_block: s.scores.query_block,
            first_head: heads.start,
            first_tiles: s.keep.first_tiles,
            k,
            num_exact,
        });
        let grid = [num_probes.div_ceil(64), heads.len(), 1];
        // For each of the 64 threads the scores and the numbers of its best blocks.
        let kernel = SELECT_GATE.shared_bytes(num_exact.min(k) * 64 * 2 * DType::F32.size());
        // SAFETY: reads scores of blocks that a probe sees; writes every word of these heads.
        unsafe { kernel.launch(grid, &[lse, chosen, nan_rows], &params) }
    }

    /// The scores of the blocks for each query tile of some heads, f32 `[heads, tiles, blocks]`, from the scores `lse`
    /// that the tile's probes gave the blocks that they chose.
    fn votes(&self, lse: &CudaTensor, heads: Range<usize>, chosen: &CudaTensor) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let [rows, num_blocks] = s.blocks();
        let BlockScores::Probes { gamma, .. } = s.scores.by else { unreachable!("probes vote") };
        let num_probes = s.shape.num_queries.div_ceil(gamma);
        let scores = self.new_f32(&[heads.len(), rows, num_blocks]);
        let params = params!(SelectVotesParams {
            num_probes,
            num_blocks,
            per_tile: s.scores.query_block / gamma,
            first_head: heads.start,
        });
        let grid = [num_blocks.div_ceil(128), rows, heads.len()];
        // SAFETY: reads scores of chosen blocks; writes every score.
        unsafe { SELECT_VOTES.launch(grid, &[lse, chosen, &scores], &params) }?;
        Ok(scores)
    }
}

/// The mask of dense attention of the probes alone: the call's first row and every position that is a multiple of
/// `gamma`. It lies beside `like`.
fn probe_mask(shape: CallShape, gamma: usize, like: &CudaTensor) -> Result<KeyMask<CudaTensor>, KernelError> {
    let context = shape.context();
    let offset = context % gamma;
    let num_probes = (shape.num_queries + offset).div_ceil(gamma);
    let tiles = num_probes.div_ceil(SIDE);
    // A tile of probes sees the keys up to its last probe, whose position in the call is `last * gamma - offset`.
    let last = |tile: usize| ((tile + 1) * SIDE).min(num_probes) - 1;
    let keys_of = |tile: usize| context + (last(tile) * gamma).saturating_sub(offset) + 1;
    let entries: usize = (0..tiles).map(|tile| keys_of(tile).div_ceil(SIDE)).sum();
    // The mask's first word stays unused, since a place of 0 marks an absent array; `row_ptr` has tiles + 1 words.
    let [row_ptr_at, tile_idx_at, query_order_at] = [1, tiles + 2, tiles + 2 + entries];
    let num_words = query_order_at + num_probes;
    let words = like.empty_contiguous(&[num_words], DType::I32);
    let params =
        params!(ProbeMaskParams { num_probes, context, gamma, offset, row_ptr_at, tile_idx_at, query_order_at });
    // SAFETY: the mask has room for the key tiles of every query tile; `keys_of` counts keys like the kernel.
    unsafe { PROBE_MASK.launch([tiles, 1, 1], &[&words], &params) }?;
    Ok(KeyMask {
        shape,
        // The queries of this mask are the probes.
        tiles: Tiles { num_queries: num_probes, ..Tiles::new(shape, SIDE, SIDE) },
        heads_per_list: shape.num_heads,
        heads_per_order: shape.num_heads,
        causal: true,
        dense_rows: Vec::new(),
        places: MaskPlaces {
            row_ptr: row_ptr_at..tile_idx_at,
            tile_idx: tile_idx_at..query_order_at,
            // All heads share an order of some rows. Where every row is a probe, they are in order and need none.
            query_order: if num_probes < shape.num_queries { query_order_at..num_words } else { 0..0 },
            ..MaskPlaces::default()
        },
        words,
        counts: None,
    })
}

impl Qkv {
    /// Corrects the output `o` of attention under a mask in place. Every `gamma`-th position and the call's first row
    /// are probes, whose dense attention is `probe_o`, or computed here. Rows in `dense_rows` are already dense and do
    /// not change.
    ///
    /// # Shapes
    /// - q, k, v: bf16 `[1, num_keys, heads, head_dim]`
    /// - o, probe_o: bf16 `[1, num_queries, num_heads, head_dim]` contiguous; of probe_o only probes are read
    ///
    /// # Errors
    /// Sizes that do not fit, probes of every position.
    pub fn correct_by_probes(
        &self,
        o: &CudaTensor,
        probe_o: Option<&CudaTensor>,
        correction: ProbeCorrection,
        dense_rows: Range<usize>,
        softmax_scale: f32,
    ) -> Result<(), KernelError> {
        const NAME: &str = "correct_by_probes";
        let shape = self.shape(NAME)?;
        let [batch, num_queries, num_heads, head_dim] = o.dims(NAME, "o")?;
        operands!(only NAME, o: BF16[batch, num_queries, num_heads, head_dim] contiguous);
        let gamma = correction.gamma;
        let fits = [shape.batch, shape.num_heads, shape.head_dim_v] == [1, num_heads, head_dim]
            && num_queries <= shape.seq_len
            && gamma > 1
            && num_queries > gamma;
        require!(fits, NAME, "shape": format!("{shape:?}, o of {:?}, {correction:?}", o.shape()),
            "the outputs of a call of more than gamma queries, gamma above 1");
        let call =
            CallShape { num_queries, num_keys: shape.seq_len, num_heads, num_kv_heads: shape.num_kv_heads, head_dim };
        let computed;
        let probe_o = match probe_o {
            Some(probe_o) => probe_o,
            None => {
                computed = self.sparse_attention_forward(&probe_mask(call, gamma, o)?, softmax_scale)?;
                &computed.o
            }
        };
        operands!(only NAME, probe_o: BF16[batch, num_queries, num_heads, head_dim] contiguous);
        let offset = call.context() % gamma;
        let num_probes = (num_queries + offset).div_ceil(gamma);
        let width = num_heads * head_dim;
        let params = params!(ProbeCorrectParams {
            num_queries,
            width,
            gamma,
            offset,
            dense_first: dense_rows.start,
            dense_end: dense_rows.end,
            replaces_only: correction.replaces_only,
        });
        let grid = [num_probes, width.div_ceil(1024), 1];
        // SAFETY: `o` and `probe_o` have num_queries rows; the probes' rows were written before.
        unsafe { PROBE_CORRECT.launch(grid, &[o, probe_o], &params) }
    }
}

const SELECT_GATE: SourceKernel = SourceKernel::new("select_gate").threads(64);
const SELECT_VOTES: SourceKernel = SourceKernel::new("select_votes").threads(128);
const PROBE_MASK: SourceKernel = SourceKernel::new("probe_mask").threads(128);
const PROBE_CORRECT: SourceKernel = SourceKernel::new("probe_correct").threads(128);
