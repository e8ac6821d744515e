//! Forward and backward over the model's segments: embedding, blocks, head with loss.
//!
//! Each segment is a graph of its own. The forward pass cuts the graph between segments; the backward pass walks them
//! from the last and seeds each with the gradient of its output. A block's graph is freed as soon as its gradient is
//! known. An indexer that learns from later layers, too, gets their gradients in the same way.
//!
//! Activation checkpointing is part of this walk, because Burn cannot build a graph inside a backward pass. A
//! recomputed block keeps only its input, and its graph is built when the backward pass reaches it. The same ops run on
//! the same numbers, so gradients are equal to the last bit.
mod indexers;

use crate::segment::Segment;
use crate::{DeviceBatch, GradientBuffer, TrainError};
use burn::module::AutodiffModule;
use burn::tensor::{Int, Tensor};
use indexers::IndexGraph;
use sieve_core::recipe::ActivationCheckpointSection;
use sieve_core::{Keeping, Recipe};
use sieve_nn::{
    DecoderLayer, HandedIndex, IndexTensors, LastChoice, LayerContext, LayerOutput, PassSettings, PassState, Qwen3,
};
use sieve_ops::{
    DeviceBackend, Documents, GemmPrecision, KeptAttention, KernelPolicy, KeyOrder, PassFor, RotaryEmbedding, SumOrder,
    TrainBackend, seed_gradient,
};
use std::ops::Range;

/// Loss, masks and statistics of one micro-batch; its gradients go to the buffer.
#[derive(Clone, Debug)]
pub struct MicroBatchResult<B: TrainBackend> {
    /// Sum of the cross-entropies times `loss_scale`, `[1]`.
    pub loss: Tensor<B::InnerBackend, 1>,
    /// DMA's masks by layer, `[batch, num_kv_heads, seq_len]` each: for each key, the first query that does not see it
    /// any more. Empty for other kinds.
    pub expire: Vec<Tensor<B, 3, Int>>,
    /// DMA's scores by layer, of the same shape, where its bias clamps large ones; empty elsewhere.
    pub clamped_scores: Vec<Tensor<B::InnerBackend, 3>>,
    /// Statistics of MSA's indexers by layer, `[3]` each, if the settings ask for them; see
    /// [`sieve_ops::index_statistics`].
    pub indexers: Vec<Tensor<B::InnerBackend, 1>>,
}

/// How a forward and backward pass computes the blocks.
#[derive(Clone, Debug, Default)]
pub struct BlockSettings {
    /// Which blocks are recomputed in the backward pass.
    pub checkpointing: ActivationCheckpointSection,
    /// Indices of the blocks that run their GEMMs in fp8.
    pub fp8: Range<usize>,
    /// How each layer computes. The pass itself sets the precision of each block, and whether a pass is for gradients
    /// alone.
    pub layers: PassSettings,
}

impl From<&Recipe> for BlockSettings {
    /// The settings that a recipe gives; a setting without a key has its default.
    fn from(recipe: &Recipe) -> Self {
        Self {
            checkpointing: recipe.activation_checkpoint.clone(),
            fp8: recipe.training.fp8_blocks(recipe.model.num_hidden_layers),
            layers: PassSettings {
                policy: KernelPolicy {
                    sums: if recipe.training.deterministic { SumOrder::Fixed } else { SumOrder::Any },
                    keys: if recipe.training.same_bits { KeyOrder::Epochs } else { KeyOrder::Leaving },
                    ..KernelPolicy::default()
                },
                token_share: 1.0 / recipe.training.tokens_per_step().max(1) as f64,
                indexers_alone: recipe.training.trains_indexers_alone(),
                ..PassSettings::default()
            },
        }
    }
}

impl BlockSettings {
    fn precision(&self, layer_idx: usize) -> GemmPrecision {
        if self.fp8.contains(&layer_idx) { GemmPrecision::Fp8 } else { GemmPrecision::Tensors }
    }
}

/// What is kept of a decoder block for its backward pass.
enum Block<B: TrainBackend> {
    /// Both ends of its graph: the input, which receives a gradient, and the output; and those of indexers.
    Graph(Tensor<B, 3>, Tensor<B, 3>, IndexGraph<B>),
    /// For a block that is recomputed.
    Input(Recomputed<B>),
}

/// What a block is computed from again.
struct Recomputed<B: TrainBackend> {
    input: Tensor<B::InnerBackend, 3>,
    /// The key blocks that an earlier layer chose for it too.
    last_choice: LastChoice<B>,
    /// Of that layer's indexer, if the block trains it too.
    index: Option<IndexTensors<B::InnerBackend>>,
    /// What is kept of its attention.
    attention: Option<KeptAttention<B::InnerBackend>>,
}

/// Collectives that run while a forward or backward pass runs.
pub(crate) trait PassHooks<B: TrainBackend> {
    /// Runs before the forward pass of a segment.
    fn before_forward(
        &mut self,
        model: &mut Qwen3<B>,
        segment: Segment,
        gradients: &mut GradientBuffer<B>,
    ) -> Result<(), TrainError>;
    /// Runs after the forward pass of a segment whose graph is not kept: until its backward pass, no code reads its
    /// weights.
    fn after_forward(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError>;
    /// Runs before the backward pass of a block, which recomputes the block if its graph was not kept.
    fn before_backward(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError>;
    /// Runs when this micro-batch has added its last gradient of a segment.
    fn after_backward(
        &mut self,
        model: &mut Qwen3<B>,
        segment: Segment,
        gradients: &mut GradientBuffer<B>,
    ) -> Result<(), TrainError>;
}

/// The hooks of a process without others.
pub(crate) struct Alone;

impl<B: TrainBackend> PassHooks<B> for Alone {
    fn before_forward(&mut self, _: &mut Qwen3<B>, _: Segment, _: &mut GradientBuffer<B>) -> Result<(), TrainError> {
        Ok(())
    }

    fn after_forward(&mut self, _: &mut Qwen3<B>, _: Segment) -> Result<(), TrainError> {
        Ok(())
    }

    fn before_backward(&mut self, _: &mut Qwen3<B>, _: Segment) -> Result<(), TrainError> {
        Ok(())
    }

    fn after_backward(&mut self, _: &mut Qwen3<B>, _: Segment, _: &mut GradientBuffer<B>) -> Result<(), TrainError> {
        Ok(())
    }
}

/// Runs forward and backward pass of one micro-batch and adds the gradients of `loss_scale * sum of cross-entropies` to
/// `gradients`.
///
/// With `loss_scale = 1 / (labels of the whole step)`, the micro-batches add up to the mean over the step.
pub fn accumulate_gradients_with<B: TrainBackend>(
    settings: &BlockSettings,
    model: &Qwen3<B>,
    batch: &DeviceBatch<B>,
    rope: &RotaryEmbedding<B>,
    loss_scale: f64,
    gradients: &mut GradientBuffer<B>,
) -> MicroBatchResult<B> {
    // A clone of a module shares its tensors.
    let mut model = model.clone();
    let result = pass(settings, &mut model, batch, rope, loss_scale, gradients, &mut Alone);
    result.expect("only hooks return errors")
}

/// Forward and backward pass of one micro-batch, with the collectives of `hooks` between its segments.
pub(crate) fn pass<B: TrainBackend>(
    settings: &BlockSettings,
    model: &mut Qwen3<B>,
    batch: &DeviceBatch<B>,
    rope: &RotaryEmbedding<B>,
    loss_scale: f64,
    gradients: &mut GradientBuffer<B>,
    hooks: &mut dyn PassHooks<B>,
) -> Result<MicroBatchResult<B>, TrainError> {
    if settings.layers.indexers_alone {
        return pass_of_indexers(settings, model, batch, rope, loss_scale, gradients, hooks);
    }
    let mut context = LayerContext {
        parts: batch.parts.as_ref(),
        settings: settings.layers,
        ..LayerContext::new(&batch.documents, rope)
    };
    let mut state = PassState::default();
    hooks.before_forward(model, Segment::Embedding, gradients)?;
    // Without a graph: the embedding's gradient needs the ids alone, and not the weight.
    let ids = batch.tokens.clone().inner();
    let mut stream = model.embed_tokens.valid().forward(ids.clone());
    hooks.after_forward(model, Segment::Embedding)?;

    let (mut expire, mut clamped_scores, mut indexers) = (Vec::new(), Vec::new(), Vec::new());
    let mut blocks = Vec::with_capacity(model.layers.len());
    let mut index = None;
    for layer_idx in 0..model.layers.len() {
        hooks.before_forward(model, Segment::Block(layer_idx), gradients)?;
        // No other layer keeps it for its backward pass.
        let mut handed = if model.shape().is_shared_layer(layer_idx) { index.clone() } else { None };
        let layer = &model.layers[layer_idx];
        context.settings.precision = settings.precision(layer_idx);
        if settings.checkpointing.recomputes(layer_idx) {
            let (input, last_choice, given) = (stream.clone(), state.last_choice.clone(), handed.clone());
            let output = without_graph(layer, stream, &context, &mut state, &mut handed);
            let attention = output.attention;
            blocks.push(Block::Input(Recomputed { input, last_choice, index: given, attention }));
            expire.extend(output.expire.map(Tensor::from_inner));
            clamped_scores.extend(output.clamped_scores);
            indexers.extend(output.indexer);
            stream = output.x;
            hooks.after_forward(model, Segment::Block(layer_idx))?;
        } else {
            let input = Tensor::<B, 3>::from_inner(stream).require_grad();
            let (output, ends) = with_graph(layer, input.clone(), &context, &mut state, gradients, &mut handed);
            expire.extend(output.expire);
            clamped_scores.extend(output.clamped_scores.map(Tensor::inner));
            indexers.extend(output.indexer);
            stream = output.x.clone().inner();
            blocks.push(Block::Graph(input, output.x, ends));
        }
        index = handed.or(index);
    }

    // Recomputed blocks must not return their statistics a second time.
    context.settings.measures_indexers = false;
    hooks.before_forward(model, Segment::Head, gradients)?;
    let input = Tensor::<B, 3>::from_inner(stream).require_grad();
    let loss = model.head.loss(input.clone(), batch.labels.clone(), &model.embed_tokens);
    let loss = loss.mul_scalar(loss_scale);
    let value = loss.clone().inner();
    let mut computed = loss.backward();
    gradients.collect(&model.head, &mut computed);
    // A tied embedding is a parameter of the head too.
    gradients.collect(&model.embed_tokens, &mut computed);
    let dy = input.grad_remove(&mut computed).expect("the loss depends on the stream");
    drop(computed);
    hooks.after_backward(model, Segment::Head, gradients)?;

    let dy = backward_of_blocks(settings, model, blocks, dy, context, gradients, hooks)?;
    let vocab_size = model.embed_tokens.weight.val().dims()[0];
    let (dy, ids) = (dy.into_primitive().tensor(), ids.into_primitive());
    let gradient = B::InnerBackend::embedding_backward(dy, ids, vocab_size);
    gradients.add_values(&model.embed_tokens.weight, gradient);
    hooks.after_backward(model, Segment::Embedding, gradients)?;

    Ok(MicroBatchResult { loss: value, expire, clamped_scores, indexers })
}

/// As [`pass`], where indexers alone are trained. Their gradients come from the attention of their own layer and of
/// those that read its choice, so their backward pass follows the last one's forward pass, and no gradient goes through
/// blocks.
fn pass_of_indexers<B: TrainBackend>(
    settings: &BlockSettings,
    model: &mut Qwen3<B>,
    batch: &DeviceBatch<B>,
    rope: &RotaryEmbedding<B>,
    loss_scale: f64,
    gradients: &mut GradientBuffer<B>,
    hooks: &mut dyn PassHooks<B>,
) -> Result<MicroBatchResult<B>, TrainError> {
    let mut context = LayerContext { settings: settings.layers, ..LayerContext::new(&batch.documents, rope) };
    let mut state = PassState::default();
    hooks.before_forward(model, Segment::Embedding, gradients)?;
    let mut stream = model.embed_tokens.valid().forward(batch.tokens.clone().inner());
    hooks.after_forward(model, Segment::Embedding)?;
    let mut indexers = Vec::new();
    // The layer of the last indexer, and the outputs that it learns from.
    let mut learning: (usize, Vec<Tensor<B, 4>>) = (0, Vec::new());
    for layer_idx in 0..model.layers.len() {
        hooks.before_forward(model, Segment::Block(layer_idx), gradients)?;
        let layer = model.layers[layer_idx].for_indexer_alone();
        context.settings.precision = settings.precision(layer_idx);
        let no_caches = None;
        let output = layer.forward(Tensor::from_inner(stream), &context, &mut state, no_caches);
        stream = output.x.inner();
        indexers.extend(output.indexer);
        if let Some(made) = state.index.made.take() {
            let of_layer = std::mem::replace(&mut learning, (layer_idx, Vec::new()));
            indexers::learn(model, of_layer, gradients);
            state.index.given = Some(made);
        }
        learning.1.append(&mut state.indexed);
        if !(layer_idx + 1..model.layers.len()).any(|later| model.shape().is_shared_layer(later)) {
            // So that no layer's graph waits for a later one.
            indexers::learn(model, std::mem::take(&mut learning), gradients);
        }
    }
    indexers::learn(model, learning, gradients);
    for layer_idx in 0..model.layers.len() {
        hooks.after_backward(model, Segment::Block(layer_idx), gradients)?;
    }
    hooks.before_forward(model, Segment::Head, gradients)?;
    let loss = model.head.valid().loss(stream, batch.labels.clone().inner(), &model.embed_tokens.valid());
    for segment in [Segment::Head, Segment::Embedding] {
        hooks.after_backward(model, segment, gradients)?;
    }
    Ok(MicroBatchResult { loss: loss.mul_scalar(loss_scale), expire: Vec::new(), clamped_scores: Vec::new(), indexers })
}

/// The backward passes of all blocks, from the last to the first, beginning with the gradient of the last one's output.
/// Returns the gradient of the first one's input.
fn backward_of_blocks<B: TrainBackend>(
    settings: &BlockSettings,
    model: &mut Qwen3<B>,
    blocks: Vec<Block<B>>,
    mut dy: Tensor<B::InnerBackend, 3>,
    mut context: LayerContext<'_, B>,
    gradients: &mut GradientBuffer<B>,
    hooks: &mut dyn PassHooks<B>,
) -> Result<Tensor<B::InnerBackend, 3>, TrainError> {
    let mut state = PassState::default();
    // The outputs of blocks that are recomputed here were given before: this pass is for gradients alone.
    context.settings.pass = PassFor::Gradients;
    let mut of_index = None;
    for (layer_idx, block) in blocks.into_iter().enumerate().rev() {
        hooks.before_backward(model, Segment::Block(layer_idx))?;
        let layer = &model.layers[layer_idx];
        let (input, output, ends) = match block {
            Block::Graph(input, output, ends) => (input, output, ends),
            Block::Input(Recomputed { input, last_choice, mut index, attention }) => {
                state.last_choice = last_choice;
                state.attention = attention.map(KeptAttention::from_inner);
                let input = Tensor::<B, 3>::from_inner(input).require_grad();
                context.settings.precision = settings.precision(layer_idx);
                let (output, ends) = with_graph(layer, input.clone(), &context, &mut state, gradients, &mut index);
                (input, output.x, ends)
            }
        };
        let seed = ends.seeded(seed_gradient(output, Tensor::from_inner(dy)), &mut of_index);
        let mut computed = seed.backward();
        ends.collect(&mut computed, &mut of_index);
        gradients.collect(layer, &mut computed);
        hooks.after_backward(model, Segment::Block(layer_idx), gradients)?;
        dy = input.grad_remove(&mut computed).expect("a block's output depends on its input");
    }
    Ok(dy)
}

/// A block's forward pass with a graph. Where possible, the GEMMs of its backward pass add directly to the gradients of
/// earlier micro-batches: the layer takes these sums out of the buffer, and the sums that it leaves are put back.
///
/// `index` has the values of the last indexer before the block, and then of the block's own if it has one.
fn with_graph<B: TrainBackend>(
    layer: &DecoderLayer<B>,
    x: Tensor<B, 3>,
    context: &LayerContext<'_, B>,
    state: &mut PassState<B>,
    gradients: &mut GradientBuffer<B>,
    index: &mut Option<IndexTensors<B::InnerBackend>>,
) -> (LayerOutput<B>, IndexGraph<B>) {
    state.sums = gradients.take_sums(layer);
    state.index = HandedIndex { given: index.clone().map(IndexTensors::leaves), made: None };
    let no_caches = None;
    let output = layer.forward(x, context, state, no_caches);
    gradients.give_back(std::mem::take(&mut state.sums));
    let ends = IndexGraph(std::mem::take(&mut state.index));
    if let Some(made) = &ends.0.made {
        *index = Some(made.clone().inner());
    }
    (output, ends)
}

/// The settings of a pass without a graph. Of what a backward pass could use it returns the attention's output alone.
fn settings_without_graph(settings: PassSettings) -> PassSettings {
    PassSettings { keeping: Keeping { attention: settings.keeping.attention, ..Keeping::default() }, ..settings }
}

/// A block's forward pass on the inner backend, which keeps no activations.
fn without_graph<B: TrainBackend>(
    layer: &DecoderLayer<B>,
    x: Tensor<B::InnerBackend, 3>,
    context: &LayerContext<'_, B>,
    state: &mut PassState<B>,
    index: &mut Option<IndexTensors<B::InnerBackend>>,
) -> LayerOutput<B::InnerBackend> {
    // Every field by name, here and below: one that is added has to say what it is without a graph.
    let LayerContext { documents, positions, rope, parts, shared, settings } = context;
    assert!(shared.is_none(), "rows of training share no prompts");
    let documents = Documents {
        start: documents.start.clone().inner(),
        end: documents.end.clone().inner(),
        positions: documents.positions.clone().inner(),
    };
    let inner = LayerContext {
        documents: &documents,
        positions: positions.clone().inner(),
        rope: &rope.map(&Tensor::inner),
        parts: *parts,
        shared: None,
        settings: settings_without_graph(*settings),
    };
    let last_choice = std::mem::take(&mut state.last_choice).map(Tensor::inner);
    let handed = HandedIndex { given: index.take(), made: None };
    let (mut inner_state, no_caches) = (PassState { last_choice, index: handed, ..PassState::default() }, None);
    let output = layer.valid().forward(x, &inner, &mut inner_state, no_caches);
    let HandedIndex { given, made } = inner_state.index;
    *index = made.or(given);
    // Later layers may attend to the key blocks that this one chose.
    state.last_choice = inner_state.last_choice.map(Tensor::from_inner);
    output
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_core::KeepOLow;

    /// Each setting has another value than its default here, also one that is added: without it this does not compile.
    /// A pass that copies settings one by one, and lacks one, would give a recomputed block that one's default.
    #[test]
    fn a_recomputed_block_has_every_setting_of_its_pass() {
        let keeping = Keeping { o_low: KeepOLow::Always, recomputable: true, attention: true };
        let settings = PassSettings {
            precision: GemmPrecision::Fp8,
            keeping,
            pass: PassFor::Gradients,
            policy: KernelPolicy { sums: SumOrder::Fixed, ..KernelPolicy::default() },
            token_share: 0.25,
            measures_indexers: true,
            reads_all: true,
            indexers_alone: true,
        };
        let recomputed = settings_without_graph(settings);
        assert_eq!(recomputed.keeping, Keeping { attention: true, ..Keeping::default() });
        assert_eq!(PassSettings { keeping, ..recomputed }, settings);
    }
}
