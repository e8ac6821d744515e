use super::{
    AttentionCall, AttentionLayer, AttentionLayerCall, DmaLayer, KeptAttention, LayerTokens, Residual, attention_layer,
    forward,
};
use crate::block::gemm::Operands;
use crate::dma::tests::reference_run as dma_reference;
use crate::linear::added;
use crate::testing::{
    Ad, Float, Input, Random, RandomInput, View, check_finite_differences, check_parity, check_views, documents,
    evaluate, float, primitive,
};
use crate::{
    AttentionSpec, DmaBias, Documents, GemmPrecision, QkNorm, QkNormRopeCall, RmsNormCall, RotaryEmbedding,
    SieveBackend, attention, dynamic_mask_attention, linear, linear_add, qk_norm_rope, reference, rms_norm,
};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, TensorMetadata};
use burn_flex::Flex;
use sieve_core::{DmaRecency, DmaShape, FarKeys, Keeping};

const EPSILON: f64 = 1e-5;
const QK_EPSILON: f64 = 1e-4;
const HEAD_DIM: usize = 8;
const NUM_KV_HEADS: usize = 3;
const ALL: Keeping = Keeping::ALL;

/// One call to test: the kind of attention (DMA where `dma` is set, else dense or a window, as `spec` says), the
/// documents, and whether x is added to the output.
struct Case {
    spec: AttentionSpec,
    dma: Option<DmaShape>,
    documents: Documents<Ad>,
    residual: Residual,
}

impl Case {
    /// A call of this kind with `group_size` query heads per KV head, in rows `dims`, `[batch, tokens]`, with
    /// documents.
    fn new(group_size: usize, kind: Kind, dims: [usize; 2], residual: Residual) -> Self {
        let spec = AttentionSpec {
            window_size: match kind {
                Kind::Window(window_size) | Kind::Far(window_size, _) => Some(window_size),
                _ => None,
            },
            far: match kind {
                Kind::Far(_, far) => Some(far),
                _ => None,
            },
            ..AttentionSpec::dense([NUM_KV_HEADS * group_size, NUM_KV_HEADS], HEAD_DIM)
        };
        let dma = match kind {
            Kind::Dma(keep_window_size) => Some(DmaShape::published(keep_window_size)),
            Kind::Recency(keep_window_size) => Some(DmaShape {
                bias: DmaBias::Linear,
                recency: DmaRecency::Slope,
                local_window_size: keep_window_size / 2,
                ..DmaShape::published(keep_window_size)
            }),
            _ => None,
        };
        Self { spec, dma, documents: documents(&[dims[1] / 3, 1], dims), residual }
    }

    fn rope(&self, like: &Float) -> RotaryEmbedding<Ad> {
        RotaryEmbedding::with_dtype(HEAD_DIM, 64, 100.0, &Default::default(), like.dtype())
    }

    /// The layer whose weights are in `inputs`, in the order of [`inputs`](Self::inputs).
    fn layer(&self, inputs: &[Float], keeping: Keeping) -> AttentionLayer<Ad> {
        AttentionLayer {
            norm: float(&inputs[1]),
            epsilon: EPSILON,
            qkv: float(&inputs[2]),
            qk_norm: self.qk_norm(inputs),
            o: float(&inputs[5]),
            dma: self.dma.map(|spec| DmaLayer { w_dt: float(&inputs[6]), a: float(&inputs[7]), spec }),
            precision: GemmPrecision::Tensors,
            keeping,
            sums: [None, None],
            kept: None,
        }
    }

    fn op(&self, inputs: &[Float]) -> Float {
        self.op_that_keeps(inputs, Keeping::default())
    }

    /// The op under test, which keeps activations as `keeping` says.
    fn op_that_keeps(&self, inputs: &[Float], keeping: Keeping) -> Float {
        self.op_of(self.layer(inputs, keeping), inputs)
    }

    /// The op under test with what an earlier pass has kept of its attention.
    fn op_again(&self, inputs: &[Float]) -> Float {
        let rope = self.rope(&inputs[0]);
        let layer = self.layer(inputs, ALL);
        let (y, kept) = forward::<Flex>(Ad::value(inputs[0].clone()), layer.clone().values(), self.call(&rope));
        let kept = kept.attended.kept(y).map(KeptAttention::from_inner);
        assert_eq!(kept.is_some(), self.dma.is_none());
        self.op_of(AttentionLayer { kept, ..layer }, inputs)
    }

    fn op_of(&self, layer: AttentionLayer<Ad>, inputs: &[Float]) -> Float {
        let rope = self.rope(&inputs[0]);
        let tokens = LayerTokens {
            positions: self.documents.positions.clone(),
            rope: &rope,
            documents: &self.documents,
            parts: None,
        };
        let x = float(&inputs[0]);
        let output = attention_layer(x, layer, tokens, self.spec, self.residual);
        assert_eq!(output.chosen.is_some(), self.dma.is_some());
        primitive(output.y)
    }

    fn call(&self, rope: &RotaryEmbedding<Ad>) -> AttentionLayerCall<Flex> {
        AttentionLayerCall {
            positions: self.documents.positions.clone().into_primitive(),
            rope: rope.tables().values(),
            attention: AttentionCall::new(self.documents.bounds(), self.spec),
            parts: None,
            residual: self.residual,
        }
    }

    /// The references of the layer's ops, one after another.
    fn reference(&self, inputs: &[Float]) -> Float {
        let (x, spec, bounds) = (inputs[0].clone(), self.spec, self.documents.bounds());
        let [batch, seq_len, _] = float::<3>(&x).dims();
        let normed =
            reference::rms_norm::<Ad>(RmsNormCall { x: x.clone(), weight: inputs[1].clone(), epsilon: EPSILON });
        let packed = float::<3>(&reference::linear::<Ad>(normed, inputs[2].clone()));
        let packed = packed.reshape([batch, seq_len, spec.packed_heads(), HEAD_DIM]);
        let rotation = QkNormRopeCall {
            q_weight: inputs[3].clone(),
            k_weight: inputs[4].clone(),
            positions: self.documents.positions.clone().into_primitive(),
            rope: self.rope(&x).tables(),
            num_kv_heads: NUM_KV_HEADS,
            epsilon: QK_EPSILON,
        };
        let qkv = reference::qk_norm_rope::<Ad>(primitive(packed), rotation);
        let o = match self.dma {
            None => reference::attention::<Ad>(qkv, &AttentionCall::new(bounds, spec)).o,
            Some(dma) => {
                let inputs = [qkv, inputs[6].clone(), inputs[7].clone()];
                dma_reference(&inputs, &self.documents, spec, dma)
            }
        };
        let o = primitive(float::<4>(&o).flatten::<3>(2, 3));
        let y = reference::linear::<Ad>(o, inputs[5].clone());
        added::<Ad>((self.residual == Residual::Stream).then_some(x), y)
    }

    /// The layer as a chain of Sieve's single ops, each with a node of its own in the graph.
    fn parts(&self, inputs: &[Float]) -> Float {
        let x = float::<3>(&inputs[0]);
        let [batch, seq_len, _] = x.dims();
        let normed = rms_norm(x.clone(), float(&inputs[1]), EPSILON);
        let shape = [batch, seq_len, self.spec.packed_heads(), HEAD_DIM];
        let qkv = linear(normed, float(&inputs[2])).reshape(shape);
        let positions = self.documents.positions.clone();
        let rope = self.rope(&inputs[0]);
        let qkv = qk_norm_rope(qkv, self.qk_norm(inputs), positions, &rope, NUM_KV_HEADS);
        let (spec, documents) = (self.spec, &self.documents);
        let o = match self.layer(inputs, Keeping::NOTHING).dma {
            None => attention(qkv, documents, spec),
            Some(dma) => dynamic_mask_attention(qkv, dma, documents, spec).expect("fits").o,
        };
        let o = o.flatten::<3>(2, 3);
        primitive(match self.residual {
            Residual::Stream => linear_add(o, float(&inputs[5]), x),
            Residual::None => linear(o, float(&inputs[5])),
        })
    }

    fn qk_norm(&self, inputs: &[Float]) -> QkNorm<Ad> {
        QkNorm { q_weight: float(&inputs[3]), k_weight: float(&inputs[4]), epsilon: QK_EPSILON }
    }

    /// x and the weights, in the order of the gradients.
    fn inputs(&self, [batch, seq_len]: [usize; 2], d_model: usize) -> Vec<Input> {
        let mut random = Random(1);
        let (packed, width) = (self.spec.packed_heads(), self.spec.num_heads * HEAD_DIM);
        let values = NUM_KV_HEADS * HEAD_DIM;
        let mut inputs = vec![
            random.input(&[batch, seq_len, d_model]),
            random.input(&[d_model]).affine(0.3, 1.0),
            random.input(&[packed * HEAD_DIM, d_model]).affine(0.3, 0.0),
            random.input(&[HEAD_DIM]).affine(0.3, 1.0),
            random.input(&[HEAD_DIM]).affine(0.3, 1.0),
            random.input(&[d_model, width]).affine(0.3, 0.0),
        ];
        if self.dma.is_some() {
            inputs.push(random.input(&[NUM_KV_HEADS, values]).affine(0.2, 0.0));
            inputs.push(random.input(&[NUM_KV_HEADS]).affine(0.5, 0.0));
        }
        inputs
    }
}

/// Dense attention, a window of so many tokens, alone or with keys beyond it, or DMA that keeps so many keys, without
/// and with recency.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Dense,
    Window(usize),
    Far(usize, FarKeys),
    Dma(usize),
    Recency(usize),
}

const FAR: Kind = Kind::Far(3, FarKeys { sink_tokens: 1, distances: [3, 12], num_bands: 3, first_band: 0 });
const KINDS: [Kind; 6] = [Kind::Dense, Kind::Window(5), FAR, Kind::Dma(4), Kind::Dma(99), Kind::Recency(6)];

#[test]
fn equals_the_reference_and_finite_differences_for_kinds_groups_and_documents() {
    for kind in KINDS {
        for (group_size, dims, residual) in
            [(2, [2, 37], Residual::Stream), (1, [1, 13], Residual::None), (4, [1, 1], Residual::Stream)]
        {
            let case = Case::new(group_size, kind, dims, residual);
            let (inputs, op) = (case.inputs(dims, 20), |inputs: &[Float]| case.op(inputs));
            let what = format!("attention_layer {kind:?} group {group_size} {dims:?}");
            check_parity(&what, &inputs, &op, &|inputs| case.reference(inputs));
            check_views(&what, &inputs, &op);
        }
        let case = Case::new(2, kind, [1, 9], Residual::Stream);
        let what = format!("attention_layer {kind:?}");
        check_finite_differences(&what, &case.inputs([1, 9], 6), &|inputs| case.op(inputs));
    }
}

// A layer of single ops keeps all intermediate values. The op of the whole layer recomputes some, with the same ops, so
// results are equal to the last bit.
#[test]
fn equals_a_chain_of_single_ops_to_the_last_bit() {
    let dims = [2, 37];
    for kind in KINDS {
        for residual in [Residual::Stream, Residual::None] {
            let case = Case::new(2, kind, dims, residual);
            let inputs = case.inputs(dims, 20);
            let run = |op: &dyn Fn(&[Float]) -> Float| evaluate(op, &inputs, 5, DType::F32, View::Contiguous);
            let found = run(&|inputs| case.op(inputs));
            let expected = run(&|inputs| case.parts(inputs));
            assert_eq!(found, expected, "{kind:?} {residual:?}");
            let found = run(&|inputs| case.op_that_keeps(inputs, ALL));
            assert_eq!(found, expected, "{kind:?} {residual:?}, all kept");
            let found = run(&|inputs| case.op_again(inputs));
            assert_eq!(found, expected, "{kind:?} {residual:?}, attention kept");
        }
    }
}

// With `recomputable`, sieve-plan counts the normed residual stream and the rotated heads of each token.
#[test]
fn kept_activations_are_those_that_the_plan_counts() {
    let dims = [2, 19];
    for kind in KINDS {
        let case = Case::new(2, kind, dims, Residual::Stream);
        let inputs: Vec<_> = case.inputs(dims, 3).iter().map(|x| x.tensor(DType::F32)).collect();
        let leaves: Vec<_> = inputs.iter().cloned().map(Ad::from_inner).collect();
        let rope = case.rope(&leaves[0]);
        let layer = case.layer(&leaves, ALL).values();
        let (_, all) = forward::<Flex>(inputs[0].clone(), layer, case.call(&rope));
        let [Operands::X(normed), _] = all.operands else {
            panic!("{kind:?}: no normed stream");
        };
        let rotated = all.rotated.expect("rotated heads");
        let numbers = [normed, rotated].map(|x| x.shape().num_elements());
        let a_token = inputs[1].shape().num_elements() + case.spec.packed_heads() * HEAD_DIM;
        assert_eq!(numbers.iter().sum::<usize>(), dims[0] * dims[1] * a_token);
    }
}
