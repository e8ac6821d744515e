//! What the GPU's allocator holds beyond the tensors: the tensors of a step, one after another, in the allocator
//! itself.
//!
//! Sizes and order are those of sieve-train's pass over the segments. Tensors below a few MiB are left out.

use super::activations::{
    F32, block_kept, block_temporaries, can_keep_attention, joins_attention, logit_bytes, shards_weights, times,
};
use super::parts::Held;
use crate::Target;
use crate::context_parallel::RowShare;
use sieve_core::kinds::ParamSpec;
use sieve_core::model::ModelShape;
use sieve_core::recipe::{GradientDtype, Recipe};
use sieve_core::{Keeping, Lasting};
use sieve_kernels::{HeldMemory, HeldTensor, MemoryFull};
use std::collections::VecDeque;

/// Bytes of a bf16 value.
const BF16: u64 = 2;
/// Elements of a unit of which ranks have whole numbers; a matrix of fewer units than ranks is not divided.
const UNIT: u64 = 128;
/// Segments whose sums over the ranks run at once, besides the one that starts.
const PENDING_SUMS: usize = 2;

/// What two training steps of one of `ranks` ranks hold in the allocator of a GPU of `card_bytes`; `None` if they take
/// more than four times as much.
pub(crate) fn held_by_steps(
    recipe: &Recipe,
    shape: &ModelShape,
    target: &Target,
    ranks: usize,
    keeping: Keeping,
    card_bytes: u64,
) -> Option<Held> {
    let run = Run::new(recipe, shape, target, ranks, keeping);
    run.two_steps(HeldMemory::new(card_bytes, 4 * card_bytes)).ok()
}

/// Sizes of a run's tensors.
struct Run<'a> {
    recipe: &'a Recipe,
    shape: &'a ModelShape,
    target: &'a Target,
    ranks: usize,
    keeping: Keeping,
    rows: RowShare,
    tokens: u64,
    num_shards: u64,
    shards_weights: bool,
    num_micro_batches: usize,
    embedding: ParamSpec,
    /// With a tied embedding the same.
    output: ParamSpec,
}

/// A part of the model with a graph of its own, as the trainer walks them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Segment {
    Embedding,
    Block(usize),
    Head,
}

impl<'a> Run<'a> {
    /// `ranks` is the number of processes, and `keeping` what blocks keep for their backward pass.
    fn new(recipe: &'a Recipe, shape: &'a ModelShape, target: &'a Target, ranks: usize, keeping: Keeping) -> Self {
        let rows = RowShare::of(recipe);
        let mut all = shape.all_parameters();
        let (last, embedding) = (all.pop().expect("a norm at least"), all.swap_remove(0));
        let output = if shape.tie_word_embeddings { embedding.clone() } else { last };
        Self {
            recipe,
            shape,
            target,
            ranks,
            keeping,
            rows,
            tokens: rows.tokens() as u64,
            num_shards: recipe.parallelism.num_shards(ranks) as u64,
            shards_weights: shards_weights(recipe, ranks),
            num_micro_batches: rows.micro_batches(recipe.training.global_batch_size, ranks),
            embedding,
            output,
        }
    }

    /// Takes two steps as the trainer does: the sizes that last are asked for first, and behind the first step what no
    /// tensor has goes back.
    ///
    /// # Errors
    /// The memory is full.
    fn two_steps(&self, mut memory: HeldMemory) -> Result<Held, MemoryFull> {
        let weights = self.weights(&mut memory)?;
        memory.release_unused();
        let lasting = Lasting::of(self.recipe, self.shape, self.ranks, |spec| self.piece(spec));
        memory.expect(&lasting.all())?;
        let moments = self.moments(&mut memory)?;
        let mut step = Step { run: self, memory, most_bytes: 0 };
        step.take()?;
        step.memory.release_unused();
        let mut again = lasting.wholes.clone();
        for (&bytes, &count) in &lasting.gradients {
            *again.entry(bytes).or_default() += count;
        }
        step.memory.expect(&again)?;
        step.take()?;
        drop((weights, moments));
        Ok(Held { tensor_bytes: step.most_bytes, held_bytes: step.memory.peak_bytes() })
    }

    /// Elements of a rank's piece of a parameter; `None` for vectors and small matrices, which all ranks have whole.
    fn piece(&self, spec: &ParamSpec) -> Option<u64> {
        let units = spec.num_elements() / UNIT;
        let is_cut = self.num_shards > 1 && spec.dims.len() > 1 && units >= self.num_shards;
        is_cut.then(|| units / self.num_shards * UNIT)
    }

    /// Matrices of a segment. The head's with a tied embedding are the embedding's.
    fn matrices(&self, segment: Segment) -> Vec<ParamSpec> {
        let mut all = match segment {
            Segment::Embedding => vec![self.embedding.clone()],
            Segment::Head => vec![self.output.clone()],
            Segment::Block(layer) => self.shape.of_layer(layer).layer_parameters(),
        };
        all.retain(|spec| spec.dims.len() > 1);
        all
    }

    /// The bf16 weights and the bits that they lack of the masters, this rank's pieces under ZeRO-3. With ZeRO-1 and 2
    /// a rank has a copy of its pieces beside the whole weights.
    fn weights(&self, memory: &mut HeldMemory) -> Result<Vec<HeldTensor>, MemoryFull> {
        let mut held = Vec::new();
        for spec in self.shape.all_parameters() {
            let whole = spec.num_elements();
            let piece = self.piece(&spec);
            let own = piece.unwrap_or(whole);
            // Drawn in f32.
            let drawn = memory.hold(own * F32)?;
            held.push(memory.hold(own * BF16)?);
            held.push(memory.hold(own * BF16)?);
            if piece.is_some() && !self.shards_weights {
                held.push(memory.hold(whole * BF16)?);
            }
            drop(drawn);
        }
        Ok(held)
    }

    fn moments(&self, memory: &mut HeldMemory) -> Result<Vec<HeldTensor>, MemoryFull> {
        let lasting = Lasting::of(self.recipe, self.shape, self.ranks, |spec| self.piece(spec));
        let sizes = lasting.moments.iter().flat_map(|(&bytes, &count)| std::iter::repeat_n(bytes, count));
        sizes.map(|bytes| memory.hold(bytes)).collect()
    }

    fn stream_bytes(&self) -> u64 {
        self.of_tokens(self.shape.d_model)
    }

    /// Bytes of a bf16 tensor of so many columns a token.
    fn of_tokens(&self, columns: usize) -> u64 {
        times(self.tokens, columns as u64 * BF16)
    }

    /// Sizes of the tensors that a block with a graph keeps behind its forward pass, without its input.
    fn kept(&self, layer_idx: usize) -> Vec<u64> {
        let layer = self.shape.of_layer(layer_idx);
        let all = times(self.tokens, block_kept(&layer, self.target, self.rows.attended(self.shape), self.keeping))
            + self.rows.kept_bytes(&layer, BF16);
        let packed = layer.attention.as_kind().packed_width(&layer) as usize;
        let mut sizes = vec![
            self.of_tokens(packed),
            self.of_tokens(layer.q_width()),
            self.stream_bytes(),
            self.of_tokens(2 * layer.d_ff),
        ];
        if self.keeping.recomputable {
            sizes.extend([self.stream_bytes(), self.stream_bytes(), self.of_tokens(layer.d_ff)]);
            sizes.extend(joins_attention(&layer).then(|| self.of_tokens(packed)));
        }
        let rest = all.saturating_sub(self.stream_bytes() + sizes.iter().sum::<u64>());
        sizes.push(rest);
        sizes
    }

    /// Sizes of the temporary tensors of a block's backward pass, without gradients of weights: in the phase of the
    /// feed-forward, and in that of the attention.
    fn temporaries(&self, layer_idx: usize) -> [Vec<u64>; 2] {
        let layer = self.shape.of_layer(layer_idx);
        let stream = self.stream_bytes();
        let matrix = F32 * (layer.d_model * layer.d_ff) as u64;
        let packed = layer.attention.as_kind().packed_width(&layer) as usize;
        let all = block_temporaries(&layer, self.target, &self.recipe.training, &self.rows)
            + self.rows.temporary_bytes(&layer, BF16);
        let feed_forward = vec![stream, self.of_tokens(layer.d_ff)];
        let mut attention =
            vec![stream, self.of_tokens(layer.q_width()), self.of_tokens(packed), self.of_tokens(packed)];
        // `all` is the largest phase. If it is the attention's, gate and up and the feed-forward's input (`gone`) are
        // subtracted in it, since they are freed by then, and the f32 gradients of the feed-forward's three matrices
        // are added. Without both, what remains beside the tensors above are f32 sums. If another phase is the largest,
        // the same difference exceeds these sums.
        let gone = self.of_tokens(2 * layer.d_ff + layer.d_model);
        let rest = (all + gone).saturating_sub(3 * matrix + attention.iter().sum::<u64>());
        attention.push(rest.min(all));
        [feed_forward, attention]
    }
}

/// A step under way.
struct Step<'a> {
    run: &'a Run<'a>,
    memory: HeldMemory,
    most_bytes: u64,
}

/// Gradients of the weights so far.
#[derive(Default)]
struct Gradients {
    /// Sums over micro-batches.
    sums: Vec<HeldTensor>,
    /// Sums over the ranks that run: whole gradients and the pieces that are made of them.
    pending: VecDeque<Vec<HeldTensor>>,
}

/// What is kept of a block for its backward pass.
struct Kept {
    input: HeldTensor,
    tensors: Vec<HeldTensor>,
    has_graph: bool,
    /// With a graph, the block's whole weights under ZeRO-3.
    weights: Vec<HeldTensor>,
}

impl Step<'_> {
    /// Takes a step with at most two micro-batches: from the second on they all hold the same.
    fn take(&mut self) -> Result<(), MemoryFull> {
        let mut gradients = Gradients::default();
        for place in 0..self.run.num_micro_batches.clamp(1, 2) {
            self.micro_batch(place, &mut gradients)?;
        }
        // The update frees gradients one by one.
        Ok(())
    }

    fn hold(&mut self, bytes: u64) -> Result<HeldTensor, MemoryFull> {
        let held = self.memory.hold(bytes)?;
        self.most_bytes = self.most_bytes.max(self.memory.tensor_bytes());
        Ok(held)
    }

    fn all(&mut self, sizes: &[u64]) -> Result<Vec<HeldTensor>, MemoryFull> {
        sizes.iter().filter(|bytes| **bytes > 0).map(|bytes| self.hold(*bytes)).collect()
    }

    /// The whole weights of a segment under ZeRO-3.
    fn gathered(&mut self, segment: Segment) -> Result<Vec<HeldTensor>, MemoryFull> {
        if !self.run.shards_weights {
            return Ok(Vec::new());
        }
        let sizes: Vec<u64> = self.run.matrices(segment).iter().map(|spec| spec.num_elements() * BF16).collect();
        self.all(&sizes)
    }

    /// Holds and frees the tensors of a micro-batch's passes in the order of the trainer; `place` is its number in the
    /// step, 0 or 1. Under ZeRO-3 the forward pass gathers weights one segment ahead.
    fn micro_batch(&mut self, place: usize, gradients: &mut Gradients) -> Result<(), MemoryFull> {
        let run = self.run;
        let num_layers = run.shape.num_layers;
        let embedding = self.gathered(Segment::Embedding)?;
        let mut next = self.gathered(Segment::Block(0))?;
        let mut stream = self.hold(run.stream_bytes())?;
        drop(embedding);
        let mut blocks = Vec::new();
        for layer in 0..num_layers {
            let weights = std::mem::take(&mut next);
            let after = if layer + 1 < num_layers { Segment::Block(layer + 1) } else { Segment::Head };
            next = self.gathered(after)?;
            let (kept, output) = self.forward(layer, stream, weights)?;
            blocks.push(kept);
            stream = output;
        }
        let mut dy = self.loss(place, stream, next, gradients)?;
        let mut next = Vec::new();
        for (layer, mut block) in blocks.into_iter().enumerate().rev() {
            let mut weights = std::mem::take(&mut block.weights);
            if weights.is_empty() {
                weights = std::mem::take(&mut next);
            }
            if weights.is_empty() {
                weights = self.gathered(Segment::Block(layer))?;
            }
            if layer > 0 && run.recipe.activation_checkpoint.recomputes(layer - 1) {
                next = self.gathered(Segment::Block(layer - 1))?;
            }
            dy = self.backward(place, layer, block, dy, gradients)?;
            drop(weights);
        }
        let gradient = self.hold(run.embedding.num_elements() * F32)?;
        drop(dy);
        self.add(place, std::slice::from_ref(&run.embedding), vec![gradient], gradients)?;
        while let Some(done) = gradients.pending.pop_front() {
            drop(done);
        }
        Ok(())
    }

    /// A block's forward pass; what it keeps, and its output.
    fn forward(
        &mut self,
        layer: usize,
        input: HeldTensor,
        weights: Vec<HeldTensor>,
    ) -> Result<(Kept, HeldTensor), MemoryFull> {
        let run = self.run;
        let recomputes = run.recipe.activation_checkpoint.recomputes(layer);
        let own = run.shape.of_layer(layer);
        let normed = self.hold(run.stream_bytes())?;
        let mut tensors = self.all(&run.kept(layer))?;
        let activation = self.hold(run.of_tokens(own.d_ff))?;
        let output = self.hold(run.stream_bytes())?;
        drop((normed, activation));
        if recomputes {
            tensors.clear();
            if run.keeping.attention && can_keep_attention(&own) {
                tensors = self.all(&[run.of_tokens(own.q_width()), run.stream_bytes()])?;
            }
        }
        // The last block's weights are read again at once.
        let keeps_weights = !recomputes || layer + 1 == run.shape.num_layers;
        let weights = if keeps_weights { weights } else { Vec::new() };
        Ok((Kept { input, tensors, has_graph: !recomputes, weights }, output))
    }

    /// The head's passes; returns the gradient of the blocks' output.
    fn loss(
        &mut self,
        place: usize,
        stream: HeldTensor,
        weights: Vec<HeldTensor>,
        gradients: &mut Gradients,
    ) -> Result<HeldTensor, MemoryFull> {
        let run = self.run;
        let normed = self.hold(run.stream_bytes())?;
        let logits = self.hold(logit_bytes(run.shape, run.tokens, run.target))?;
        let matrices = run.matrices(Segment::Head);
        let gradient = self.hold(matrices.iter().map(|spec| spec.num_elements() * F32).sum())?;
        let d_normed = self.hold(run.stream_bytes())?;
        drop(logits);
        let dy = self.hold(run.stream_bytes())?;
        drop((normed, d_normed, stream));
        self.add(place, &matrices, vec![gradient], gradients)?;
        drop(weights);
        Ok(dy)
    }

    /// A block's backward pass, behind its forward pass where it is recomputed. Returns the gradient of its input.
    fn backward(
        &mut self,
        place: usize,
        layer: usize,
        block: Kept,
        dy: HeldTensor,
        gradients: &mut Gradients,
    ) -> Result<HeldTensor, MemoryFull> {
        let run = self.run;
        let mut kept = block.tensors;
        if !block.has_graph {
            kept.extend(self.all(&run.kept(layer))?);
        }
        let matrices = run.matrices(Segment::Block(layer));
        let is_mlp = |spec: &&ParamSpec| spec.part == sieve_core::kinds::Part::Mlp;
        let [feed_forward, attention] = run.temporaries(layer);
        let mut made = Vec::new();
        let temporaries = self.all(&feed_forward)?;
        for spec in matrices.iter().filter(is_mlp) {
            made.extend(self.gradient(place, spec)?);
        }
        drop(temporaries);
        let d_middle = self.hold(run.stream_bytes())?;
        // Gate and up, and the feed-forward's input.
        if kept.len() > 3 {
            drop(kept.drain(2..4));
        }
        let temporaries = self.all(&attention)?;
        for spec in matrices.iter().filter(|spec| !is_mlp(spec)) {
            made.extend(self.gradient(place, spec)?);
        }
        let dx = self.hold(run.stream_bytes())?;
        drop((temporaries, d_middle, kept, dy, block.input));
        self.add(place, &matrices, made, gradients)?;
        Ok(dx)
    }

    /// The new whole gradient of a weight. Without pieces, later micro-batches add to the first one's in place.
    fn gradient(&mut self, place: usize, spec: &ParamSpec) -> Result<Option<HeldTensor>, MemoryFull> {
        let run = self.run;
        let adds_in_place = !self.keeps_pieces() && run.recipe.training.gradient_dtype == GradientDtype::F32;
        if place > 0 && adds_in_place { Ok(None) } else { self.hold(spec.num_elements() * F32).map(Some) }
    }

    /// Whether micro-batches are added up in pieces.
    fn keeps_pieces(&self) -> bool {
        let run = self.run;
        run.num_shards > 1 && (run.num_micro_batches < 2 || run.recipe.parallelism.zero_stage > 1)
    }

    /// Adds a segment's new gradients to the sums: pieces behind a sum over the ranks, or the whole ones.
    fn add(
        &mut self,
        place: usize,
        matrices: &[ParamSpec],
        made: Vec<HeldTensor>,
        gradients: &mut Gradients,
    ) -> Result<(), MemoryFull> {
        let is_rounded = self.run.recipe.training.gradient_dtype == GradientDtype::Bf16;
        let sizes: Vec<u64> = matrices.iter().map(|spec| self.run.piece(spec).unwrap_or(spec.num_elements())).collect();
        if !self.keeps_pieces() {
            match (is_rounded, place) {
                (false, _) => gradients.sums.extend(made),
                (true, 0) => {
                    for elements in sizes {
                        gradients.sums.push(self.hold(elements * BF16)?);
                    }
                }
                (true, _) => {}
            }
            return Ok(());
        }
        let mut pending = made;
        let mut pieces = Vec::new();
        for elements in &sizes {
            pieces.push(self.hold(elements * F32)?);
        }
        if place == 0 && !is_rounded {
            gradients.sums.append(&mut pieces);
        }
        if place == 0 && is_rounded {
            for elements in &sizes {
                gradients.sums.push(self.hold(elements * BF16)?);
            }
        }
        pending.append(&mut pieces);
        gradients.pending.push_back(pending);
        while gradients.pending.len() > PENDING_SUMS {
            gradients.pending.pop_front();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! The proof that a plan that fits, fits: CubeCL's allocator over the shipped recipes.
    use super::*;
    use crate::{MemoryPlan, MemoryVerdict, Target, memory_plan};
    use sieve_core::model::gpu;
    use sieve_core::recipe::sibling;

    const MIB: u64 = 1 << 20;

    /// (name, total and free MiB): an H100, an H200, and an H200 of which another process holds all but an H100's
    /// memory. Pages are parts of the total.
    const CARDS: [(&str, u64, u64); 3] =
        [("H100", 81_559, 81_000), ("H200", 143_771, 143_200), ("H200, 62 GB held", 143_771, 81_557)];

    const MHA_1P7B: &str = include_str!("../../../../recipes/mha_1p7b.toml");

    const RECIPES: [(&str, &str); 5] = [
        ("mha_1p7b", MHA_1P7B),
        ("dma_1p7b", include_str!("../../../../recipes/dma_1p7b.toml")),
        ("nsa_1p7b", include_str!("../../../../recipes/nsa_1p7b.toml")),
        ("dma_8b", include_str!("../../../../recipes/dma_8b.toml")),
        ("dma_14b", include_str!("../../../../recipes/dma_14b.toml")),
    ];

    fn card((_, total, free): (&str, u64, u64)) -> Target {
        let gpu = gpu::find("h200").expect("known");
        Target::Gpu(gpu::Gpu { memory_bytes: free * MIB, total_memory_bytes: total * MIB, ..gpu })
    }

    fn gib(bytes: u64) -> f64 {
        bytes as f64 / f64::from(1 << 30)
    }

    /// The plan, and whether two steps go through the allocator with the memory that is free.
    fn tried(recipe: &Recipe, target: &Target, ranks: usize) -> (MemoryPlan, Result<Held, MemoryFull>) {
        let shape = recipe.model_shape(recipe.model.vocab_size.unwrap_or(50_304)).expect("a shape");
        let plan = memory_plan(recipe, &shape, target, ranks);
        let Target::Gpu(gpu) = target else { unreachable!("GPUs alone") };
        let free = gpu.memory_bytes.saturating_sub(plan.program_bytes);
        let run = Run::new(recipe, &shape, target, ranks, plan.keeping);
        let held = run.two_steps(HeldMemory::new(gpu.total_memory_bytes, free));
        (plan, held)
    }

    /// Each shipped recipe of 1.7B to 14.8B in its first and last stage, its rows and fewer, one to four ranks, f32 and
    /// bf16 gradients. `--nocapture` prints plan and allocator.
    #[test]
    fn what_a_plan_calls_fitting_goes_through_the_allocator() {
        let mut wrong = Vec::new();
        let (mut num_fitting, mut num_full) = (0, 0);
        let siblings = ["mla_1p7b", "msa_1p7b"].map(|name| (name, sibling(name, MHA_1P7B).expect("a known name")));
        let siblings = siblings.iter().map(|(name, text)| (*name, text.as_str()));
        for (name, text) in RECIPES.into_iter().chain(siblings) {
            for (ranks, dtype) in [(1, "f32"), (2, "f32"), (2, "bf16"), (4, "f32")] {
                let sets = [format!("training.gradient_dtype={dtype}")];
                let Ok(recipe) = Recipe::load(text, name, &sets) else { continue };
                for stage in recipe.stages() {
                    let mut alone = recipe.at_stage(&stage);
                    let own = alone.training.local_batch_size;
                    for rows in std::collections::BTreeSet::from([own, own.div_ceil(2), 1]) {
                        if !alone.training.global_batch_size.is_multiple_of(rows * ranks) {
                            continue;
                        }
                        alone.training.local_batch_size = rows;
                        for of in CARDS {
                            let (plan, held) = tried(&alone, &card(of), ranks);
                            let fits = plan.verdict == MemoryVerdict::Fits;
                            num_fitting += usize::from(fits);
                            num_full += usize::from(held.is_err());
                            let found = match held {
                                Ok(held) => format!(
                                    "{:.2} of tensors, {:.2} held",
                                    gib(held.tensor_bytes + plan.program_bytes),
                                    gib(held.held_bytes + plan.program_bytes)
                                ),
                                Err(full) => format!("full: {:.2} more could not be had", gib(full.bytes)),
                            };
                            let line = format!(
                                "{name} {} tokens, {ranks} ranks, {rows} rows, {dtype}, {}: plan {:.2} ({:.2} of \
                                 pages), \
                                 {}; {found}",
                                alone.training.seq_len,
                                of.0,
                                gib(plan.total_bytes),
                                gib(plan.page_bytes),
                                plan.verdict.words(),
                            );
                            println!("{line}");
                            if fits && held.is_err() {
                                wrong.push(line);
                            }
                        }
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(num_fitting > 50 && num_full > 20, "{num_fitting} fit, {num_full} are full");
    }

    /// The run that was called fitting with four, two and one row and ended behind its first step: two ranks on H200s
    /// of which 81,557 MiB were free. With gradients in bf16 it ran.
    #[test]
    fn the_8b_recipe_is_not_called_fitting_where_it_was_not() {
        let text = include_str!("../../../../recipes/dma_8b.toml");
        for (rows, dtype, ran) in [(4, "f32", false), (2, "f32", false), (4, "bf16", true)] {
            let sets = [format!("training.local_batch_size={rows}"), format!("training.gradient_dtype={dtype}")];
            let recipe = Recipe::load(text, "dma_8b", &sets).expect("shipped");
            let (plan, held) = tried(&recipe, &card(CARDS[2]), 2);
            let fits = plan.verdict == MemoryVerdict::Fits;
            println!(
                "{rows} rows, {dtype}: {:.2} of pages {:.2}, {held:?}",
                gib(plan.total_bytes),
                gib(plan.page_bytes)
            );
            assert!(fits <= held.is_ok(), "{rows} rows, {dtype}: {plan:?}");
            assert!(!ran || fits, "{rows} rows, {dtype}: {plan:?}");
        }
    }
}
