//! ZeRO-3 (arXiv:1910.02054): between its uses, a rank has only its piece of each divided weight.
//!
//! The weights of a segment are gathered before its forward pass, while the segment before computes, and released after
//! it. A recomputed block's are gathered again before its backward pass, while the block after it computes. A block
//! whose graph is kept keeps its weights until its backward pass, because the graph reads them. A released parameter
//! keeps its id and shape; its values are one NaN, so that a use of it without a gather cannot go unnoticed.
use super::{GatheredLeaves, Group};
use crate::collectives::{Gathered, Pending, Primitive};
use crate::segment::Segment;
use crate::{DeviceBatch, TrainError};
use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Tensor, TensorMetadata, TensorPrimitive};
use sieve_nn::{LayerContext, PassState, Qwen3};
use sieve_ops::{RotaryEmbedding, TrainBackend};
use std::collections::HashMap;

/// This rank's piece of each divided weight, flat.
pub(crate) type WeightPieces<B> = HashMap<ParamId, Primitive<B>>;

/// The weights of a group's model during a pass. Without ZeRO-3 all weights are whole: a pass only waits until a
/// segment's updated weights have arrived, and releases none.
pub(crate) struct Weights<'a, B: TrainBackend> {
    pub(crate) group: &'a mut Group<B>,
    pub(crate) pieces: &'a WeightPieces<B>,
}

impl<B: TrainBackend> Weights<'_, B> {
    /// Makes the weights whole that a segment reads, and starts gathering the next segment's.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn before_forward(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        if self.group.share().keeps_whole {
            return self.group.put_leaves(model, segment);
        }
        let first_block = Segment::Block(0);
        let none_left = segment != Segment::Embedding || self.group.held.iter().all(|held| *held == first_block);
        assert!(none_left, "the pass before released all weights but the first block's");
        for read in segment.reads(model) {
            self.hold(model, read)?;
        }
        let next = segment.next(model).into_iter().flat_map(|next| next.reads(model));
        next.collect::<Vec<_>>().into_iter().try_for_each(|next| self.start(model, next))
    }

    /// Releases the weights of a segment whose graph is not kept. The last block's stay: they are read again at once.
    pub(crate) fn after_forward(&mut self, model: &mut Qwen3<B>, segment: Segment) {
        if segment.next(model) != Some(Segment::Head) {
            self.release(model, segment);
        }
    }

    /// Makes a block's weights whole again, and starts gathering those of the nearest earlier block that has none; in
    /// the first block, the embedding's for the step's next micro-batch.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn before_backward(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        if self.group.share().keeps_whole {
            return Ok(());
        }
        self.hold(model, segment)?;
        let before = Segment::all(model).take_while(|other| *other != segment).filter(|s| *s != Segment::Embedding);
        let missing = before.filter(|other| !self.group.held.contains(other)).last();
        match missing {
            Some(missing) => self.start(model, missing),
            // The next micro-batch begins with the embedding. A gather that began after this pass would wait for the
            // last sums.
            None if segment == Segment::Block(0) && !self.group.is_last => self.start(model, Segment::Embedding),
            None => Ok(()),
        }
    }

    /// Releases a segment's weights behind its backward pass. The first block's stay if another micro-batch of the step
    /// follows, which reads them at once.
    pub(crate) fn after_backward(&mut self, model: &mut Qwen3<B>, segment: Segment) {
        if segment != Segment::Block(0) || self.group.is_last {
            self.release(model, segment);
        }
    }

    /// Releases all weights that a segment reads.
    pub(crate) fn release(&mut self, model: &mut Qwen3<B>, segment: Segment) {
        for read in segment.reads(model) {
            if self.group.held.remove(&read) {
                read.replace(model, &mut Released { pieces: self.pieces, nan: None });
            }
        }
    }

    /// Cross-entropy of each token in nats, `[batch, seq_len]`, with the weights of one or two segments at a time.
    /// All ranks must call it equally often; a rank without a batch takes part in gathering the weights, and gets
    /// `None`.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn token_losses(
        &mut self,
        model: &mut Qwen3<B>,
        batch: Option<&DeviceBatch<B::InnerBackend>>,
        rope: &RotaryEmbedding<B::InnerBackend>,
    ) -> Result<Option<Tensor<B::InnerBackend, 2>>, TrainError> {
        let context = batch.map(|batch| LayerContext::new(&batch.documents, rope));
        let (mut stream, mut losses) = (None, None);
        let mut state = PassState::default();
        for segment in Segment::all(model) {
            self.group.tick_in_pass()?;
            self.before_forward(model, segment)?;
            if let (Some(batch), Some(context)) = (batch, &context) {
                let before = stream.take();
                let x = || before.expect("the segment before has computed it");
                match segment {
                    Segment::Embedding => {
                        let x = model.embed_tokens.valid().forward(batch.tokens.clone());
                        stream = Some(x.cast(model.head.norm.weight.val().dtype()));
                    }
                    Segment::Block(layer) => {
                        let (layer, no_caches) = (model.layers[layer].valid(), None);
                        stream = Some(layer.forward(x(), context, &mut state, no_caches).x);
                    }
                    Segment::Head => {
                        let tied = model.embed_tokens.valid();
                        losses = Some(model.head.valid().token_losses(x(), batch.labels.clone(), &tied));
                    }
                }
            }
            self.release(model, segment);
        }
        Ok(losses)
    }

    /// Makes the weights of a segment whole.
    fn hold(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        self.start(model, segment)?;
        self.group.put_leaves(model, segment)?;
        self.group.held.insert(segment);
        Ok(())
    }

    /// Starts gathering the weights of a segment, unless they are whole or under way.
    fn start(&mut self, model: &Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        if self.group.held.contains(&segment) || self.group.leaves.contains_key(&segment) {
            return Ok(());
        }
        let leaves = self.group.start_gather(self.pieces, segment.shapes(model))?;
        if !leaves.ids.is_empty() {
            self.group.leaves.insert(segment, leaves);
        }
        Ok(())
    }
}

impl<B: TrainBackend> Group<B> {
    /// Starts gathering the parameters that are divided into `pieces`.
    pub(super) fn start_gather(
        &self,
        pieces: &WeightPieces<B>,
        shapes: Vec<(ParamId, Vec<usize>)>,
    ) -> Result<GatheredLeaves<B>, TrainError> {
        let share = self.share();
        let (mut ids, mut wholes, mut gathered) = (Vec::new(), Vec::new(), Vec::new());
        for (id, shape) in shapes {
            let (Some(piece), Some(pieces)) = (pieces.get(&id), share.pieces(&shape)) else {
                continue;
            };
            let (device, count) = (B::InnerBackend::float_device(piece), shape.iter().product::<usize>());
            // Allocated with one dimension, so that there are no gaps between rows: the gather fills one range.
            let whole = B::InnerBackend::float_empty([count].into(), &device, piece.dtype().into());
            let whole = B::InnerBackend::float_reshape(whole, shape.into());
            ids.push(id);
            wholes.push(whole.clone());
            gathered.push(Gathered { piece: piece.clone(), whole, pieces });
        }
        let pending: Pending<B> =
            if ids.is_empty() { Box::new(|| Ok(Vec::new())) } else { self.collectives.gather(gathered)? };
        Ok(GatheredLeaves { ids, wholes, pending })
    }
}

impl<B: TrainBackend> GatheredLeaves<B> {
    /// Waits for the gather and returns the weights by id; none if it has written into the model's own tensors.
    pub(super) fn finish(self) -> Result<HashMap<ParamId, Primitive<B>>, TrainError> {
        let Self { ids, wholes, pending } = self;
        let leaves = pending()?;
        // `leaves` is empty if the gather has written into `wholes`, or into the model's own tensors.
        let leaves = if leaves.is_empty() { wholes } else { leaves };
        Ok(ids.into_iter().zip(leaves).collect())
    }
}

/// Releases the weights that are divided into `pieces`.
struct Released<'a, B: TrainBackend> {
    pieces: &'a WeightPieces<B>,
    /// The one value of released weights, `[1]`.
    nan: Option<Primitive<B>>,
}

impl<B: TrainBackend> ModuleMapper<B> for Released<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(piece) = self.pieces.get(&param.id) else {
            return param;
        };
        let (id, tensor, mapper) = param.consume();
        let released = released::<B, D>(piece, tensor.dims(), &mut self.nan);
        Param::from_mapped_value(id, Tensor::from_inner(released).require_grad(), mapper)
    }
}

/// A released weight, of which only `piece` stays elsewhere: its shape, with one NaN as every value. `nan` holds that
/// one number for the next weight of the same type.
pub(crate) fn released<B: TrainBackend, const D: usize>(
    piece: &Primitive<B>,
    shape: [usize; D],
    nan: &mut Option<Primitive<B>>,
) -> Tensor<B::InnerBackend, D> {
    let held = nan.take().filter(|held| held.dtype() == piece.dtype());
    let value = held.unwrap_or_else(|| {
        let device = B::InnerBackend::float_device(piece);
        let zero = B::InnerBackend::float_zeros([1].into(), &device, piece.dtype().into());
        B::InnerBackend::float_add_scalar(zero, f32::NAN.into())
    });
    *nan = Some(value.clone());
    let value = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(value));
    value.reshape([1; D]).expand(shape)
}
