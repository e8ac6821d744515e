use super::Qwen3;
use crate::testing::{Rows, assert_close, ids, input, kinds, shape, values};
use crate::{Attention, DecoderLayer, KindLayer, LayerContext, PassState, SharedPrompts, WeightInit};
use burn::backend::Autodiff;
use burn::module::Module;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use sieve_core::{LayerPattern, LayerType, ModelShape};
use sieve_ops::Documents;

const DIMS: [usize; 2] = [2, 13];

#[test]
fn a_model_has_the_parameters_its_shape_counts() {
    for attention in kinds(0.0) {
        for (tie_word_embeddings, residual_scale) in [(true, false), (false, true)] {
            let shape = ModelShape {
                tie_word_embeddings,
                residual_scale,
                qk_norm: residual_scale,
                qkv_bias: tie_word_embeddings,
                attention_sinks: tie_word_embeddings,
                ..shape(attention)
            };
            let model = Qwen3::<Flex>::new(&shape, 1, &Default::default());
            let counted = shape.parameters().total();
            assert_eq!(model.num_params() as u64, counted, "{attention:?}");
            assert_eq!(model.shape(), &shape);
        }
    }
}

/// Labels are the next ids; the last one and every fifth are ignored.
fn labels() -> Tensor<Flex, 2, Int> {
    let ids: Vec<i64> = ids::<Flex>(DIMS, 1).into_data().iter::<i64>().collect();
    let label = |n: usize| {
        if (n + 1).is_multiple_of(DIMS[1]) || n.is_multiple_of(5) { sieve_ops::IGNORE_LABEL } else { ids[n + 1] as i32 }
    };
    let labels: Vec<i32> = (0..ids.len()).map(label).collect();
    Tensor::from_data(TensorData::new(labels, DIMS), &Default::default())
}

#[test]
fn losses_are_those_of_the_logits() {
    for attention in kinds(0.5) {
        for tie_word_embeddings in [true, false] {
            let shape = ModelShape { tie_word_embeddings, ..shape(attention) };
            let model = Qwen3::<Flex>::new(&shape, 1, &Default::default());
            assert_eq!(model.head.lm_head.is_none(), tie_word_embeddings);
            let rows = Rows::new(DIMS, &shape);
            let ids = ids(DIMS, 1);
            let logits = model.logits(ids.clone(), &rows.context());
            assert_eq!(logits.dims(), [2, 13, 50]);
            let log_p = values(log_softmax(logits, 2));
            let expected: Vec<f64> = labels()
                .into_data()
                .iter::<i64>()
                .enumerate()
                .map(|(n, label)| if label < 0 { 0.0 } else { -log_p[n * 50 + label as usize] })
                .collect();
            let losses = model.token_losses(ids.clone(), labels(), &rows.context());
            assert_eq!(losses.dims(), DIMS);
            assert_close("losses", &values(losses), &expected, 1e-5);
            let x = model.hidden(ids, &rows.context());
            let loss = values(model.head.loss(x, labels(), &model.embed_tokens));
            assert_close("loss", &loss, &[expected.iter().sum()], 1e-4);
        }
    }
}

#[test]
fn layers_that_share_a_choice_read_the_blocks_of_the_layer_before() {
    for attention in kinds(0.0).into_iter().filter(|kind| kind.as_kind().block_choice().is_some()) {
        let shape = ModelShape {
            num_layers: 4,
            layers: LayerPattern::new(attention, [LayerType::OWN, LayerType::SHARED]),
            ..shape(attention)
        };
        let model = Qwen3::<Flex>::new(&shape, 3, &Default::default());
        let rows = Rows::new(DIMS, &shape);
        let context = rows.context();
        let (mut chosen, mut state) = (None, PassState::default());
        let mut x = model.embed_tokens.forward(ids(DIMS, 1));
        for (at, layer) in model.layers.iter().enumerate() {
            let Attention::Chosen(chosen_blocks) = &layer.self_attn else { panic!("a kind of chosen blocks") };
            let normed = || layer.input_layernorm.forward(x.clone());
            assert_eq!(chosen_blocks.indexer.is_some(), shape.of_layer(at).indexer().is_some());
            x = match at % 2 {
                0 => {
                    chosen = chosen_blocks.block_indices(&normed, &context, &state);
                    layer.forward(x, &context, &mut state, None).x
                }
                // A layer that shares a choice, computed with the choice of the layer before.
                _ => {
                    let given = chosen.clone().expect("the layer before chose");
                    let qkv = chosen_blocks.qkv.forward(normed(), &context);
                    let (spec, choice) = (chosen_blocks.spec(), chosen_blocks.choice());
                    let o = sieve_ops::chosen_attention(qkv, given, context.documents, spec, choice);
                    let x = chosen_blocks.o_proj.forward_add(o.flatten(2, 3), x);
                    layer.feed_forward(x, &context, &mut state)
                }
            };
        }
        let found = model.hidden(ids(DIMS, 1), &rows.context());
        assert_close("hidden", &values(found), &values(x), 1e-6);
    }
}

#[test]
fn every_parameter_gets_a_gradient() {
    type Ad = Autodiff<Flex>;

    struct Missing<'a> {
        gradients: &'a <Ad as burn::tensor::backend::AutodiffBackend>::Gradients,
        seen: usize,
        zero: usize,
    }
    impl burn::module::ModuleVisitor<Ad> for Missing<'_> {
        fn visit_float<const D: usize>(&mut self, param: &burn::module::Param<Tensor<Ad, D>>) {
            let gradient = param.val().grad(self.gradients).expect("a gradient");
            assert_eq!(gradient.dims(), param.val().dims());
            let gradient = values(gradient);
            assert!(gradient.iter().all(|x| x.is_finite()));
            self.seen += 1;
            self.zero += usize::from(gradient.iter().all(|&x| x == 0.0));
        }
    }

    for attention in kinds(0.5) {
        let shape = ModelShape { residual_scale: true, tie_word_embeddings: false, ..shape(attention) };
        let model = Qwen3::<Ad>::new(&shape, 1, &Default::default());
        let rows = Rows::new(DIMS, &shape);
        let mut context = rows.context();
        context.settings.token_share = 0.1;
        let x = model.hidden(ids(DIMS, 1), &context);
        let labels = Tensor::from_inner(labels());
        let gradients = model.head.loss(x, labels, &model.embed_tokens).backward();
        let mut missing = Missing { gradients: &gradients, seen: 0, zero: 0 };
        model.visit(&mut missing);
        // Embedding, final norm, projection; per layer 2 norms, qkv, 2 head norms, o, gate_up, down, 2 scales, A and
        // W_dt.
        let per_layer = match attention {
            sieve_core::Attention::Dma(_) => 12,
            // Projections to the latent and from it, and the latent's norm, in place of the packed projection.
            sieve_core::Attention::Mla(mla) => 11 + 2 * usize::from(mla.qk_norm),
            // Gates; two compressions of three; two more pairs of keys and values.
            sieve_core::Attention::Nsa(nsa) => {
                let compression = 6 * usize::from(nsa.compress_hidden_size.is_some());
                12 + compression + 2 * usize::from(!nsa.shared_kv)
            }
            // The indexer's projection and norms.
            sieve_core::Attention::Msa(_) => 13,
            _ => 10,
        };
        assert_eq!((missing.seen, missing.zero), (3 + 2 * per_layer, 0));
    }
}

#[test]
fn residual_scales_of_one_change_nothing_and_others_do() {
    let plain = shape(kinds(0.5)[2]);
    let scaled = ModelShape { residual_scale: true, ..plain.clone() };
    let rows = Rows::new(DIMS, &plain);
    let x = input::<Flex, 3>([2, 13, 24], 3);
    let layer =
        |shape: &ModelShape| DecoderLayer::<Flex>::new(shape, &mut WeightInit::new(1, 0.2), &Default::default());
    let output = |layer: &DecoderLayer<Flex>| {
        values(layer.forward(x.clone(), &rows.context(), &mut PassState::default(), None).x)
    };
    let expected = output(&layer(&plain));
    let mut ones = layer(&scaled);
    let got = output(&ones);
    assert_close("scales of one", &got, &expected, 0.0);
    ones.input_residual = ones.input_residual.map(|scale| scale.map(|scale| scale * 2.0));
    let got = output(&ones);
    assert!(got != expected);
}

#[test]
fn tokens_beyond_the_rotary_tables_are_refused() {
    let shape = shape(kinds(0.5)[0]);
    let model = Qwen3::<Flex>::new(&shape, 1, &Default::default());
    let rope = model.rope(5, &Default::default());
    let mut cache = crate::KvCache::new(2);
    model.next_logits(ids([1, 5], 1), &mut cache, &rope);
    assert_eq!((cache.num_tokens, cache.layers[0].num_keys()), (5, 5));
    let beyond =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.next_logits(ids([1, 1], 1), &mut cache, &rope)));
    assert!(beyond.is_err());
}

/// A step of texts of different lengths, each with its own cache, gives each the logits that it gets alone.
#[test]
fn rows_of_different_lengths_get_the_logits_that_each_gets_alone() {
    for attention in kinds(0.5) {
        let model = Qwen3::<Flex>::new(&shape(attention), 2, &Default::default());
        let rope = model.rope(30, &Default::default());
        let mut caches: Vec<crate::KvCache<Flex>> = Vec::new();
        for len in [3, 11, 7] {
            let mut cache = crate::KvCache::new(2);
            model.next_logits(ids([1, len], len), &mut cache, &rope);
            caches.push(cache);
        }
        let mut alone = caches.clone();
        for step in 0..6 {
            let next = ids([3, 1], step);
            let mut all: Vec<_> = caches.iter_mut().collect();
            let got = model.next_logits_of_rows(next.clone(), &mut all, &rope);
            let one = |(n, cache)| model.next_logits(next.clone().narrow(0, n, 1), cache, &rope);
            let expected: Vec<_> = alone.iter_mut().enumerate().map(one).collect();
            let expected = values(Tensor::cat(expected, 0));
            assert_close(&format!("{attention:?}"), &values(got), &expected, 1e-5);
        }
        let lengths: Vec<usize> = caches.iter().map(|cache| cache.num_tokens).collect();
        assert_eq!(lengths, [9, 17, 13]);
    }
}

/// A prompt of 7 tokens that endings of 3 and 4 tokens share, and a text of 5 tokens, against the same texts as
/// separate documents.
#[test]
fn a_shared_prompt_gives_the_outputs_of_a_prompt_before_each_ending() {
    for attention in kinds(0.5) {
        for residual_scale in [false, true] {
            let shape = ModelShape { residual_scale, ..shape(attention) };
            let model = Qwen3::<Flex>::new(&shape, 3, &Default::default());
            let device = Default::default();
            let rope = model.rope(30, &device);
            // The batch has 19 tokens: the prompt (0 to 6), its endings (7 to 9 and 10 to 13) and the other text (14 to
            // 18). Attention sees two rows of 16 positions, here by the batch's tokens: prompt with first ending, the
            // other text, one padding; prompt with second ending, padding.
            let first: Vec<u32> = (0..10).chain(14..19).chain([0]).collect();
            let second: Vec<u32> = (0..7).chain(10..14).chain([0; 5]).collect();
            let start = [[0; 10].as_slice(), &[10; 5], &[15], &[0; 11], &[11; 5]].concat();
            let end = [[10; 10].as_slice(), &[15; 5], &[16], &[11; 11], &[16; 5]].concat();
            let documents = Documents::new(&start, &end, [2, 16], &device);
            let tokens = [first, second].concat();
            // For each token of the batch, one of its positions in the two rows.
            let place: Vec<usize> = (0..10).chain(23..27).chain(10..15).collect();
            let flat = ids::<Flex>([1, 19], 4);
            let repeated: Vec<i64> = {
                let flat: Vec<i64> = flat.clone().into_data().iter::<i64>().collect();
                tokens.iter().map(|&token| flat[token as usize]).collect()
            };
            let repeated = Tensor::from_data(TensorData::new(repeated, [2, 16]), &device);
            let expected = model.hidden(repeated, &LayerContext::new(&documents, &rope));
            let expected = values(expected.reshape([32, 24]).select(
                0,
                Tensor::from_data(TensorData::new(place.iter().map(|&p| p as i32).collect::<Vec<_>>(), [19]), &device),
            ));
            let positions: Vec<i32> = (0..10).chain(7..11).chain(0..5).collect();
            let whole = Documents::whole_rows([1, 19], &device);
            let shared = SharedPrompts::new(documents, &tokens, &place, &device);
            let context = LayerContext {
                positions: Tensor::from_data(TensorData::new(positions, [1, 19]), &device),
                shared: Some(&shared),
                ..LayerContext::new(&whole, &rope)
            };
            let got = values(model.hidden(flat, &context));
            assert_close(&format!("{attention:?}"), &got, &expected, 2e-5);
        }
    }
}
