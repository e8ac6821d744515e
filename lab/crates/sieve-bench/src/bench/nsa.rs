//! Rows of native sparse attention (all three branches with their gates), of InfLLM-V2, MoBA and MSA with as many keys
//! a query, and of dense attention at the same lengths.
use super::rows::{BACKWARD, ORDERS, dense, passes};
use crate::error::Result;
use crate::shape::packed_of;
use crate::timed::{Bench, Inputs, NO_BIAS, NO_WINDOW, Work, forward_flops};
use burn::tensor::Tensor;
use sieve_core::{BlockChoice, InfllmV2Shape, LocalBlocks, MobaShape, MsaShape};
use sieve_kernels::{
    AttendedBlocks, AttentionResult, AttentionShape, BlocksWithLocal, ChoiceLists, CudaTensor, DType, IndexGradient,
    KernelError, PackedGradient, Qkv, SumOrder, ToBurn, kernel_tensor, nsa_blocks, nsa_blocks_backward, nsa_gates,
    nsa_gates_backward, nsa_mean_pool,
};
use sieve_ops::{Cuda, Documents, NsaBlocks, attended_blocks};

const HEADS: [[usize; 2]; 2] = [[16, 8], [64, 4]];
const LENGTHS: [usize; 3] = [8192, 32768, 65536];
const HEAD_DIM: usize = 128;
const WINDOW: usize = 512;

const BLOCKS: NsaBlocks = NsaBlocks::PUBLISHED;

/// Times dense attention, NSA and each of [`choices`] at every shape.
pub(super) fn rows(bench: &mut Bench<'_>) -> Result<()> {
    for shape in bench.settings.shapes(&HEADS, &LENGTHS, HEAD_DIM) {
        dense(bench, shape, NO_WINDOW)?;
        time_nsa(bench, shape)?;
        for (name, choice) in choices() {
            time_choice(bench, shape, name, choice)?;
        }
    }
    Ok(())
}

/// Results of NSA's forward pass that its backward pass reads.
pub(super) struct Branches {
    blocks: CudaTensor,
    compressed: AttentionResult,
    chosen: CudaTensor,
    selected: AttentionResult,
    lists: Vec<ChoiceLists>,
    window: AttentionResult,
}

/// Inputs of one NSA call. The compressed keys and values are random: the GEMMs of the compression MLP are not timed.
pub(super) struct Call {
    inputs: Inputs,
    compressed: CudaTensor,
    positions: [CudaTensor; 2],
    /// The gates' logits, and the bias that is added to them.
    logits: CudaTensor,
    bias: CudaTensor,
}

impl Call {
    /// Draws what the branches read beside q, k and v: compressed keys and values, vectors of positions, logits of
    /// gates. One row; the gates' bias is 0.
    pub(super) fn new(inputs: Inputs, bench: &Bench<'_>) -> Self {
        let [_, seq_len, heads, _] = inputs.shape.output();
        let rows = BLOCKS.num_slots(seq_len) * inputs.shape.num_kv_heads;
        Self {
            compressed: bench.bf16([2, rows, inputs.shape.head_dim]),
            positions: [(); 2].map(|()| bench.bf16([BLOCKS.compress_block_size, inputs.shape.head_dim])),
            logits: bench.bf16([1, seq_len, heads * 3]),
            bias: inputs.d_o.zeros_contiguous(&[heads * 3], DType::F32),
            inputs,
        }
    }

    /// Forward pass of all branches and of the gates that add their outputs, and the gather of the blocks that the
    /// compression MLP reads.
    pub(super) fn forward(&self) -> Result<Branches, KernelError> {
        let Inputs { qkv, scale, .. } = &self.inputs;
        let documents = self.inputs.documents();
        let positions = self.positions.each_ref();
        let (compressed, chosen) =
            qkv.q.nsa_compressed_attention_forward(documents, &self.compressed, BLOCKS, *scale)?;
        let attended = AttendedBlocks::single(&chosen, BLOCKS.select_block_size);
        let (selected, lists) = qkv.nsa_selected_attention_forward(documents, attended, *scale)?;
        let branches = Branches {
            blocks: nsa_blocks([&qkv.k, &qkv.v], positions, documents, BLOCKS)?,
            selected,
            lists,
            window: self.inputs.forward(Some(WINDOW), NO_BIAS)?,
            compressed,
            chosen,
        };
        nsa_gates(outputs(&branches), &self.logits, &self.bias)?;
        Ok(branches)
    }

    /// Backward pass of all branches. Each branch gets the output's gradient in place of its gated one, which has the
    /// same size.
    pub(super) fn backward(&self, branches: &Branches, order: SumOrder) -> Result<(), KernelError> {
        let Inputs { shape, qkv, d_o, scale, .. } = &self.inputs;
        let qkv = &qkv.in_order(order);
        let documents = self.inputs.documents();
        nsa_gates_backward(outputs(branches), &self.logits, &self.bias, d_o)?;
        self.inputs.backward(&branches.window, Some(WINDOW), NO_BIAS, order)?;
        let call = self.inputs.call(qkv, &branches.selected);
        let attended = AttendedBlocks::single(&branches.chosen, BLOCKS.select_block_size);
        call.nsa_selected_attention_backward(documents, attended, &branches.lists)?;
        let of_compressed = &branches.compressed;
        qkv.q.nsa_compressed_attention_backward(documents, &self.compressed, BLOCKS, *scale, of_compressed, d_o)?;
        let packed = PackedGradient { dims: packed_of(*shape), num_kv_heads: shape.num_kv_heads };
        nsa_blocks_backward(packed, documents, BLOCKS, &branches.blocks).map(drop)
    }
}

/// Outputs of the compressed, the selected and the window branch.
fn outputs(branches: &Branches) -> [&CudaTensor; 3] {
    [&branches.compressed.o, &branches.selected.o, &branches.window.o]
}

/// FLOPs of a forward pass over the pairs of query and key that the three branches read.
pub(super) fn flops(shape: AttentionShape) -> f64 {
    let dense = forward_flops(shape, shape.seq_len);
    let chosen = BLOCKS.num_selected_blocks * BLOCKS.select_block_size;
    dense / BLOCKS.compress_stride as f64 + forward_flops(shape, chosen) + forward_flops(shape, WINDOW)
}

/// Times both passes of NSA with its gates, the backward pass in each order of sums.
fn time_nsa(bench: &mut Bench<'_>, shape: AttentionShape) -> Result<()> {
    let Some(inputs) = bench.inputs_or_skip(shape)? else {
        return Ok(());
    };
    let call = Call::new(inputs, bench);
    let flops = flops(shape);
    passes(
        bench,
        ("nsa ", shape),
        [flops, BACKWARD * flops],
        &ORDERS,
        || call.forward(),
        |branches, order| call.backward(branches, order),
    )
}

/// InfLLM-V2, MoBA and MSA with the blocks of NSA's row, and each with its published budget.
fn choices() -> [(&'static str, BlockChoice); 6] {
    let num_selected_blocks = BLOCKS.num_selected_blocks;
    let infllm =
        InfllmV2Shape { num_selected_blocks, num_local_blocks: num_selected_blocks / 2, ..InfllmV2Shape::published() };
    let moba = MobaShape { select_block_size: BLOCKS.select_block_size, num_selected_blocks };
    let msa = MsaShape { select_block_size: BLOCKS.select_block_size, num_selected_blocks, ..MsaShape::published() };
    [
        ("infllm_v2 ", infllm.choice()),
        ("moba ", moba.choice()),
        ("msa ", msa.choice()),
        ("infllm_v2, 4096 keys, ", InfllmV2Shape::published().choice()),
        ("moba, 1536 keys, ", MobaShape::published().choice()),
        ("msa, 2048 keys, ", MsaShape::published().choice()),
    ]
}

/// The operands of a kind whose queries choose blocks.
struct Chooser<'a> {
    choice: BlockChoice,
    /// The heads that choose blocks: the layer's, or an indexer's.
    scored: &'a Inputs,
    /// The layer's heads with a KV head for each choice.
    read: &'a Inputs,
    /// Rows of one document each.
    rows: Documents<Cuda>,
}

/// How attention reads the chosen blocks.
#[derive(Clone, Copy)]
enum Reading {
    /// The local blocks as a run of neighbours, and the others one by one.
    Run(LocalBlocks),
    /// Two neighbours of 64 keys as one block.
    Pairs,
    OneByOne,
}

impl Reading {
    /// As models run a choice.
    fn of(choice: BlockChoice) -> Self {
        match choice.local() {
            Some(local) => Self::Run(local),
            None if choice.in_pairs() => Self::Pairs,
            None => Self::OneByOne,
        }
    }
}

impl Chooser<'_> {
    /// Tokens of a block as attention reads it.
    fn block_size(&self) -> usize {
        self.choice.attended().select_block_size
    }

    /// Chosen blocks that are not read as a run.
    fn attended<'a>(&self, chosen: &'a CudaTensor, reading: Reading) -> AttendedBlocks<'a> {
        AttendedBlocks { indices: chosen, size: self.block_size(), in_pairs: matches!(reading, Reading::Pairs) }
    }

    /// The chosen blocks as attention reads them; pools the keys first.
    fn choose(&self) -> Result<CudaTensor, KernelError> {
        let (choice, documents, Qkv { q, k, v }) = (self.choice, self.scored.documents(), &self.scored.qkv);
        let pooled = nsa_mean_pool([k, v], documents, choice.blocks)?;
        let chosen = q.choose_key_blocks(documents, &pooled, choice, self.scored.scale)?;
        if choice.pieces() == 1 {
            return Ok(chosen);
        }
        let chosen = attended_blocks(Tensor::from_primitive(chosen.burn()), &self.rows, choice);
        Ok(kernel_tensor(chosen.into_primitive()))
    }

    /// Attention of some heads over chosen blocks.
    fn attend(
        &self,
        inputs: &Inputs,
        chosen: &CudaTensor,
        reading: Reading,
    ) -> Result<(AttentionResult, Vec<ChoiceLists>), KernelError> {
        let (documents, size, scale) = (inputs.documents(), self.block_size(), inputs.scale);
        match reading {
            Reading::Run(local) => {
                let blocks = BlocksWithLocal { indices: chosen, size, local };
                inputs.qkv.local_and_selected_attention_forward(documents, blocks, scale)
            }
            _ => inputs.qkv.nsa_selected_attention_forward(documents, self.attended(chosen, reading), scale),
        }
    }

    /// The backward pass of [`attend`](Self::attend), which returned `result` and `lists`.
    fn attend_backward(
        &self,
        inputs: &Inputs,
        (chosen, reading): (&CudaTensor, Reading),
        (result, lists): &(AttentionResult, Vec<ChoiceLists>),
        order: SumOrder,
    ) -> Result<(), KernelError> {
        let qkv = inputs.qkv.in_order(order);
        let (call, documents, size) = (inputs.call(&qkv, result), inputs.documents(), self.block_size());
        match reading {
            Reading::Run(local) => {
                let blocks = BlocksWithLocal { indices: chosen, size, local };
                call.local_and_selected_attention_backward(documents, blocks, lists)
            }
            _ => call.nsa_selected_attention_backward(documents, self.attended(chosen, reading), lists),
        }
    }

    /// Times what an indexer's loss adds to a backward pass: on Hopper one kernel for the loss's gradient; elsewhere
    /// that gradient is a forward and a backward pass of attention with the indexer's heads, `indexer`, and with the
    /// layer's.
    fn time_loss(&self, bench: &mut Bench<'_>, names: (&str, AttentionShape), indexer: &Inputs) -> Result<()> {
        let (name, shape) = names;
        let (chosen, reading) = (self.choose()?, Reading::of(self.choice));
        let (attention, lists) = self.attend(self.read, &chosen, reading)?;
        let attended = self.choice.attended();
        let tokens = attended.num_selected_blocks * attended.select_block_size;
        // The scores of the heads and of the indexer, then two GEMMs with the difference of their probabilities.
        let flops = forward_flops(shape, tokens) / 2.0 + 1.5 * forward_flops(indexer.shape, tokens);
        for (order, suffix) in ORDERS {
            bench.row(&format!("{name}loss{suffix}"), shape, Work::Flops(flops), || {
                let heads = self.read.qkv.in_order(order);
                let gradient = IndexGradient {
                    queries_and_keys: [&heads.q, &heads.k],
                    index: self.scored.qkv.q.tensor(),
                    lse: &attention.lse,
                    blocks: self.attended(&chosen, reading),
                    lists: &lists,
                    weight: 1.0,
                };
                let documents = self.read.documents();
                if gradient.index_gradient(documents, self.read.scale)?.is_some() {
                    return Ok(());
                }
                for inputs in [indexer, self.read] {
                    let forward = self.attend(inputs, &chosen, reading)?;
                    self.attend_backward(inputs, (&chosen, reading), &forward, order)?;
                }
                Ok(())
            });
        }
        Ok(())
    }
}

/// Times the choice of blocks (pooling included) and choice with attention. Where each query head chooses (MoBA),
/// attention reads keys and values copied to every head; the copy is not timed. Where an indexer chooses (MSA), also
/// times what its loss adds to a backward pass.
fn time_choice(bench: &mut Bench<'_>, shape: AttentionShape, name: &str, choice: BlockChoice) -> Result<()> {
    let heads = [shape.num_heads, shape.num_kv_heads];
    let of_heads = |[num_heads, num_kv_heads]: [usize; 2]| AttentionShape { num_heads, num_kv_heads, ..shape };
    let (scored_shape, choosers) = (of_heads(choice.scored_heads(heads)), choice.choices_per_token(heads));
    let read = bench.inputs_or_skip(of_heads([shape.num_heads, choosers]))?;
    let (Some(scored), Some(read)) = (bench.inputs_or_skip(scored_shape)?, read) else {
        return Ok(());
    };
    let rows = Documents::<Cuda>::whole_rows([1, shape.seq_len], &Default::default());
    let chooser = Chooser { choice, scored: &scored, read: &read, rows };
    // One GEMM of a forward pass's two: the scores.
    let scores = forward_flops(scored_shape, shape.seq_len) / choice.blocks.compress_stride as f64 / 2.0;
    bench.row(&format!("{name}choice"), shape, Work::Flops(scores), || chooser.choose().map(drop));
    let attended = choice.attended();
    let flops = forward_flops(shape, attended.num_selected_blocks * attended.select_block_size);
    let indexer = bench.inputs_or_skip(of_heads([choosers; 2]))?.filter(|_| choice.has_indexer());
    if let Some(indexer) = indexer {
        chooser.time_loss(bench, (name, shape), &indexer)?;
    }
    // As models run it; where they do not read blocks one by one, that too.
    let reading = Reading::of(choice);
    let one_by_one = (format!("{name}block by block "), Reading::OneByOne);
    let one_by_one = (!matches!(reading, Reading::OneByOne)).then_some(one_by_one);
    for (name, reading) in std::iter::once((name.to_owned(), reading)).chain(one_by_one) {
        passes(
            bench,
            (&name, shape),
            [scores + flops, BACKWARD * flops],
            &ORDERS,
            || {
                let chosen = chooser.choose()?;
                let forward = chooser.attend(&read, &chosen, reading)?;
                Ok((chosen, forward))
            },
            |(chosen, forward), order| chooser.attend_backward(&read, (chosen, reading), forward, order),
        )?;
    }
    Ok(())
}
