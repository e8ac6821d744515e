//! A trained model whose weights are divided among ranks, for passes without gradients: as ZeRO-3 divides them.
//!
//! Every rank computes the same passes on the same tokens. A part of the model is gathered when a pass reaches it and
//! dropped behind it, so a rank holds its pieces, and one block or the largest matrix. Ranks stay in step because all
//! read rank 0's logits.
use super::weights::released;
use super::{Group, WeightPieces};
use crate::TrainError;
use crate::collectives::{Exchanged, Primitive, flat};
use crate::segment::Shapes;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Tensor, TensorPrimitive};
use sieve_comm::Work;
use sieve_nn::{DecoderLayer, LmHead, TokenEmbedding, WholeWeights};
use sieve_ops::TrainBackend;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The divided weights of a model on one rank.
pub struct ShardedWeights<B: TrainBackend> {
    group: Mutex<Group<B>>,
    pieces: WeightPieces<B>,
    /// The first gather that failed; passes cannot return it.
    error: Mutex<Option<TrainError>>,
}

/// Keeps this rank's piece of each divided parameter that it maps, and releases the parameter.
pub struct PieceKeeper<'a, B: TrainBackend> {
    weights: &'a mut ShardedWeights<B>,
    nan: Option<Primitive<B>>,
}

impl<B: TrainBackend> ShardedWeights<B> {
    /// No weights yet; a [`keeper`](Self::keeper) adds them. `group` are the ranks.
    pub fn new(mut group: Group<B>) -> Self {
        group.set_zero_stage(3);
        Self { group: Mutex::new(group), pieces: HashMap::new(), error: Mutex::new(None) }
    }

    /// A mapper that keeps this rank's pieces of a model's parameters. On every rank it maps parameters of the same
    /// shapes in the same order.
    pub fn keeper(&mut self) -> PieceKeeper<'_, B> {
        PieceKeeper { weights: self, nan: None }
    }

    /// Checks that a text, for example the path of the checkpoint, is the same on all ranks.
    ///
    /// # Errors
    /// A rank is lost, or has another text.
    pub fn check_equal(&self, text: &str) -> Result<(), TrainError> {
        let group = self.group();
        group.check_equal(text)?;
        // From here on ranks wait for each other in every pass.
        group.set_work(Work::Long);
        Ok(())
    }

    /// Bytes of this rank's pieces.
    pub fn piece_bytes(&self) -> usize {
        use burn::tensor::TensorMetadata;
        self.pieces.values().map(|piece| piece.shape().num_elements() * piece.dtype().size()).sum()
    }

    /// The first error of a gather: what passes computed since then means nothing.
    pub fn take_error(&self) -> Option<TrainError> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn group(&self) -> MutexGuard<'_, Group<B>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a part of the model with whole weights; if the gather fails, the part as it is.
    fn whole<M: Module<B::InnerBackend>>(&self, part: &M) -> M {
        let mut shapes = Shapes(Vec::new());
        part.visit(&mut shapes);
        let group = self.group();
        group.tick();
        let leaves = group.start_gather(&self.pieces, shapes.0).and_then(|leaves| leaves.finish());
        match leaves {
            Ok(leaves) => part.clone().map(&mut Whole::<B>(leaves)),
            Err(error) => {
                self.note(error);
                part.clone()
            }
        }
    }

    /// Returns rank 0's logits on every rank, because ranks may round differently; after an error this rank's.
    fn agreed(&self, logits: Tensor<B::InnerBackend, 3>) -> Tensor<B::InnerBackend, 3> {
        let (shape, group) = (logits.dims(), self.group());
        let shards = group.share().group;
        let own = flat::<B>(logits.clone().into_primitive().tensor()).into_primitive().tensor();
        let exchanged = match shards.place() {
            0 => Exchanged {
                given: (1..shards.size()).map(|place| (place, own.clone())).collect(),
                wanted: Vec::new(),
                like: own,
            },
            _ => Exchanged { given: Vec::new(), wanted: vec![(0, shape.iter().product())], like: own },
        };
        let found = group.exchange(exchanged).and_then(|pending| pending());
        match found {
            Ok(found) => found.into_iter().next().map_or(logits, |first| {
                let first = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(first));
                first.reshape(shape)
            }),
            Err(error) => {
                self.note(error);
                logits
            }
        }
    }

    /// Keeps the first error.
    fn note(&self, error: TrainError) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

impl<B: TrainBackend> fmt::Debug for ShardedWeights<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedWeights").field("pieces", &self.pieces.len()).finish_non_exhaustive()
    }
}

/// The source from which a model takes whole weights; the caller shares it, to read its error.
#[derive(Debug)]
struct Shared<B: TrainBackend>(Arc<ShardedWeights<B>>);

impl<B: TrainBackend> ShardedWeights<B> {
    /// The source of a model whose parameters were mapped by [`keeper`](Self::keeper).
    pub fn source(self: &Arc<Self>) -> Box<dyn WholeWeights<<B as AutodiffBackend>::InnerBackend>> {
        Box::new(Shared(self.clone()))
    }
}

impl<B: TrainBackend> WholeWeights<<B as AutodiffBackend>::InnerBackend> for Shared<B> {
    fn embedding(&self, part: &TokenEmbedding<B::InnerBackend>) -> TokenEmbedding<B::InnerBackend> {
        self.0.whole(part)
    }

    fn layer(&self, part: &DecoderLayer<B::InnerBackend>) -> DecoderLayer<B::InnerBackend> {
        self.0.whole(part)
    }

    fn head(&self, part: &LmHead<B::InnerBackend>) -> LmHead<B::InnerBackend> {
        self.0.whole(part)
    }

    fn agreed(&self, logits: Tensor<B::InnerBackend, 3>) -> Tensor<B::InnerBackend, 3> {
        self.0.agreed(logits)
    }
}

impl<B: TrainBackend> ModuleMapper<B::InnerBackend> for PieceKeeper<'_, B> {
    /// Keeps this rank's piece of a divided weight and releases the whole weight; leaves other weights alone.
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<B::InnerBackend, D>>,
    ) -> Param<Tensor<B::InnerBackend, D>> {
        let Some(range) = self.weights.group().share().range(&param.lazy_shape()) else {
            return param;
        };
        let (id, tensor, mapper) = param.consume();
        let shape = tensor.dims();
        let piece = flat::<B>(tensor.into_primitive().tensor()).slice([range]).into_primitive().tensor();
        // A copy: a slice would keep the whole tensor in memory.
        let piece = B::InnerBackend::float_mul_scalar(piece, 1f32.into());
        let released = released::<B, D>(&piece, shape, &mut self.nan);
        self.weights.pieces.insert(id, piece);
        Param::from_mapped_value(id, released, mapper)
    }
}

/// Writes gathered weights into a part of a model.
struct Whole<B: TrainBackend>(HashMap<ParamId, Primitive<B>>);

impl<B: TrainBackend> ModuleMapper<B::InnerBackend> for Whole<B> {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<B::InnerBackend, D>>,
    ) -> Param<Tensor<B::InnerBackend, D>> {
        let Some(whole) = self.0.remove(&param.id) else {
            return param;
        };
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, Tensor::from_primitive(TensorPrimitive::Float(whole)), mapper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Autodiff;
    use burn::tensor::TensorData;
    use burn_flex::{Flex, FlexDevice};
    use sieve_comm::{Mesh, ReservedPort, Timeouts, World};
    use sieve_core::Recipe;
    use sieve_nn::{KvCache, LayerContext, Qwen3};
    use sieve_ops::Documents;

    const NUM_RANKS: usize = 3;

    /// Logits of 24 tokens in one pass, and of the last one after the others in a cache.
    fn logits(model: &Qwen3<Flex>) -> [Vec<f32>; 2] {
        let values = (0..24).map(|token| token * 5 % 64).collect::<Vec<i32>>();
        let ids = Tensor::from_data(TensorData::new(values, [1, 24]), &FlexDevice);
        let documents = Documents::whole_rows([1, 24], &FlexDevice);
        let rope = model.rope(24, &FlexDevice);
        let whole = model.logits(ids.clone(), &LayerContext::new(&documents, &rope));
        let mut cache = KvCache::new(model.layers.len());
        let last = (0..24).map(|at| model.next_logits(ids.clone().narrow(1, at, 1), &mut cache, &rope)).last();
        let host = |data: TensorData| data.iter::<f32>().collect();
        [host(whole.into_data()), host(last.expect("some tokens").into_data())]
    }

    #[test]
    fn a_divided_model_computes_the_bits_of_a_whole_one_and_holds_its_pieces() {
        for tied in ["true", "false"] {
            let small = format!(
                "model.num_hidden_layers=4 model.hidden_size=96 model.intermediate_size=80 model.num_attention_heads=4 \
                 model.num_key_value_heads=2 model.head_dim=32 model.vocab_size=64 model.tie_word_embeddings={tied}"
            );
            let overrides = small.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let recipe = include_str!("../../../../recipes/dma_80m.toml");
            let recipe = Recipe::load(recipe, "a recipe", &overrides).expect("a recipe");
            let shape = recipe.model_shape(64).expect("a shape");
            let expected = logits(&Qwen3::new(&shape, 7, &FlexDevice));
            let port = ReservedPort::take().expect("a port");
            let of_rank = |rank: usize| {
                let world = World::on_this_host(rank, NUM_RANKS, port.number());
                let mesh = Arc::new(Mesh::join(world, "1", Timeouts::default(), |_| {}).expect("three ranks"));
                let mut weights = ShardedWeights::<Autodiff<Flex>>::new(Group::on_host(mesh.clone(), 0));
                let model = Qwen3::<Flex>::new(&shape, 7, &FlexDevice).map(&mut weights.keeper());
                weights.check_equal("the same").expect("three ranks");
                let own = model.layers[1].mlp.down_proj.weight.val().into_data();
                assert!(own.iter::<f32>().all(f32::is_nan), "released");
                let weights = Arc::new(weights);
                let mut model = model.with_whole_weights(weights.source());
                if rank == 1 {
                    // A device whose arithmetic differs: the norm is a vector, which each rank has whole.
                    let norm = model.head.norm.weight.val() * 1.01;
                    model.head.norm.weight = Param::from_tensor(norm);
                }
                let found = logits(&model);
                assert!(weights.take_error().is_none());
                mesh.leave();
                (weights.piece_bytes() as u64, found)
            };
            let all = std::thread::scope(|scope| {
                let ranks = [0, 1, 2].map(|rank| scope.spawn(move || of_rank(rank)));
                ranks.map(|rank| rank.join().expect("no panic"))
            });
            let held = all.iter().map(|(bytes, _)| bytes);
            let parameters = 4 * shape.parameters().total();
            // Vectors and matrices that are too small to be divided are whole on each rank, and are not counted here.
            assert!(held.clone().sum::<u64>() > parameters * 9 / 10 && held.clone().sum::<u64>() <= parameters);
            assert!(held.clone().all(|&bytes| bytes < parameters * 4 / 10), "{:?}", held.collect::<Vec<_>>());
            assert!(all.iter().all(|(_, found)| *found == expected), "tied: {tied}");
        }
    }
}
