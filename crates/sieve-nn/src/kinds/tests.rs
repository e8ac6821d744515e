use super::{Attention, Forward, LayerContext, PassState};
use crate::layer::KindAttention;
use crate::testing::{KEEP_WINDOW_SIZE, Rows, assert_close, input, kinds, msa_in_warmup, shape, values};
use crate::{AttentionConfig, DecoderLayer, KvCache, LayerCache, LayerOutput, SlotCache, WeightInit};
use burn::backend::Autodiff;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_flex::Flex;
use sieve_core::{DmaBias, DmaRecency, DmaShape, KeyOrder, MlaShape, ModelShape, NsaShape};
use sieve_ops::{Documents, Residual, RowsOf, SieveBackend, TokenCache};
use std::collections::BTreeSet;

fn layer<B: burn::tensor::backend::Backend>(attention: sieve_core::Attention) -> Attention<B> {
    let mut init = WeightInit::new(1, 0.2);
    Attention::new(&shape(attention), &mut init, &Default::default())
}

/// The layer's output for whole rows, without a residual.
fn one_pass<B: SieveBackend>(layer: &Attention<B>, x: &Tensor<B, 3>, context: &LayerContext<'_, B>) -> LayerOutput<B> {
    layer.as_layer().forward(x.clone(), x.zeros_like(), context, &mut PassState::default(), None)
}

/// Outputs of the layer for `x`, `[1 or 2, tokens, width]`, processed with a cache in parts of these lengths. After
/// each part calls `after` with the cache, what the layer hands on, and the number of tokens so far.
fn outputs_of_parts(
    layer: &Attention<Flex>,
    x: &Tensor<Flex, 3>,
    context: LayerContext<'_, Flex>,
    parts: impl IntoIterator<Item = usize>,
    mut after: impl FnMut(&LayerCache<Flex>, &PassState<Flex>, usize),
) -> (Vec<Tensor<Flex, 3>>, KvCache<Flex>) {
    let (mut cache, mut got, mut done) = (KvCache::new(1), Vec::new(), 0);
    for new in parts {
        let documents = Documents::whole_rows([x.dims()[0], new], &Default::default());
        let context = LayerContext {
            documents: &documents,
            positions: documents.positions.clone().add_scalar(done as i64),
            ..context.clone()
        };
        let tokens = x.clone().narrow(1, done, new);
        let (residual, mut state) = (tokens.zeros_like(), PassState::default());
        let output = layer.as_layer().forward(tokens, residual, &context, &mut state, Some(&mut cache.layer(0)));
        got.push(output.x);
        done += new;
        after(&cache.layers[0], &state, done);
    }
    (got, cache)
}

/// Whether each parameter has a gradient, in the module's order.
#[derive(Default)]
struct HaveGradients(Vec<bool>);

impl<B: AutodiffBackend> ModuleVisitor<B> for HaveGradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push(param.val().is_require_grad());
    }
}

#[test]
fn a_layer_for_its_indexer_alone_has_gradients_there_and_nowhere_else() {
    for attention in kinds(0.5).into_iter().chain([msa_in_warmup()]) {
        let mut init = WeightInit::new(5, 0.2);
        let layer = DecoderLayer::<Autodiff<Flex>>::new(&shape(attention), &mut init, &Default::default());
        let has_indexer = matches!(&layer.self_attn, Attention::Chosen(layer) if layer.indexer.is_some());
        let [mut all, mut alone] = [HaveGradients::default(), HaveGradients::default()];
        layer.visit(&mut all);
        layer.for_indexer_alone().visit(&mut alone);
        assert!(all.0.len() == alone.0.len() && all.0.iter().all(|&has| has), "{attention:?}");
        // Its projection and both of its norms.
        assert_eq!(alone.0.iter().filter(|&&has| has).count(), if has_indexer { 3 } else { 0 }, "{attention:?}");
    }
}

#[test]
fn every_kind_keeps_the_shape_and_dma_returns_its_mask() {
    for attention in kinds(0.5) {
        for dims in [[2, 13], [1, 1]] {
            let rows = Rows::new(dims, &shape(attention));
            let x = input::<Flex, 3>([dims[0], dims[1], 24], 2);
            let result = one_pass(&layer::<Flex>(attention), &x, &rows.context());
            assert_eq!(result.x.dims(), [dims[0], dims[1], 24]);
            let is_dma = matches!(attention, sieve_core::Attention::Dma(_));
            assert_eq!(result.expire.map(|expire| expire.dims()), is_dma.then_some([dims[0], 3, dims[1]]));
        }
    }
}

#[test]
fn norm_and_attention_as_one_op_equal_norm_then_attention() {
    for attention in kinds(0.5) {
        let rows = Rows::new([2, 13], &shape(attention));
        let x = input::<Flex, 3>([2, 13, 24], 2);
        let (mut init, device) = (WeightInit::new(3, 0.2), Default::default());
        let mut layer = DecoderLayer::<Flex>::new(&shape(attention), &mut init, &device);
        layer.input_layernorm.weight = init.normal([24], &device);
        for residual in [Residual::Stream, Residual::None] {
            let added = match residual {
                Residual::Stream => x.clone(),
                Residual::None => x.zeros_like(),
            };
            let normed = layer.input_layernorm.forward(x.clone());
            let state = &mut PassState::default();
            let apart = layer.self_attn.as_layer().forward(normed, added, &rows.context(), state, None);
            let whole = layer.attention(x.clone(), residual, &rows.context(), state);
            let what = format!("{attention:?} {residual:?}");
            assert_close(&what, &values(whole.x), &values(apart.x), 1e-6);
            assert_eq!(whole.expire.is_some(), apart.expire.is_some());
        }
    }
}

#[test]
fn dma_starts_as_the_sliding_window_of_the_same_weights() {
    let x = input::<Flex, 3>([2, 17, 24], 3);
    let [mha, swa, dma, ..] = kinds(0.0).map(|kind| {
        let rows = Rows::new([2, 17], &shape(kind));
        values(one_pass(&layer::<Flex>(kind), &x, &rows.context()).x)
    });
    assert_close("dma at A = 0", &dma, &swa, 4e-6);
    // Up to the window's length dense attention sees the same keys; after it, others.
    let first = KEEP_WINDOW_SIZE * 24;
    assert_close("the first rows", &mha[..first], &swa[..first], 4e-6);
    assert!(mha[first..first + 24] != swa[first..first + 24]);
}

#[test]
fn a_text_in_parts_gives_the_rows_and_keeps_the_keys_of_one_pass() {
    let ranked = |keep_window_size, local_window_size, bias| {
        sieve_core::Attention::Dma(DmaShape {
            bias,
            // An exponential bias takes no slope.
            recency: if bias == DmaBias::Linear { DmaRecency::Slope } else { DmaRecency::None },
            local_window_size,
            a_init: 0.5,
            ..DmaShape::published(keep_window_size)
        })
    };
    let more =
        [msa_in_warmup(), ranked(9, 4, DmaBias::Linear), ranked(6, 2, DmaBias::Exp), ranked(40, 7, DmaBias::Linear)];
    let several = [vec![3, 7, 1, 12], vec![1, 2, 2, 18], vec![10, 13], vec![2; 11], vec![22, 1]];
    // A prompt, then token by token.
    let steps = [1, 3, 4, 9, 14].map(|prompt| [vec![prompt], vec![1; 23 - prompt]].concat());
    assert_eq!(KvCache::<Flex>::new(1).layers[0].num_keys(), 0);
    for attention in kinds(0.5).into_iter().chain(more) {
        let layer = layer::<Flex>(attention);
        let most = match attention {
            sieve_core::Attention::Swa(_) => KEEP_WINDOW_SIZE,
            sieve_core::Attention::Dma(dma) => dma.keep_window_size,
            sieve_core::Attention::Cowa(cowa) => cowa.sink_tokens + cowa.far_reach,
            _ => usize::MAX,
        };
        for parts in several.iter().chain(&steps) {
            let len = parts.iter().sum();
            let rows = Rows::new([2, len], &shape(attention));
            let x = input::<Flex, 3>([2, len, 24], 6);
            let all = one_pass(&layer, &x, &rows.context()).x;
            let what = format!("{attention:?} in parts of {parts:?}");
            let (got, _) = outputs_of_parts(&layer, &x, rows.context(), parts.iter().copied(), |cache, _, done| {
                if parts[1..].iter().all(|&part| part == 1) {
                    assert_eq!(cache.num_keys(), done.min(most), "{what}");
                }
                let Attention::Ranked(dma) = &layer else {
                    return;
                };
                let rows = Rows::new([2, done], &shape(attention));
                let so_far = dma.qkv.forward(x.clone().narrow(1, 0, done), &rows.context());
                let of_rows = dma.masked(so_far, rows.context().documents, dma.spec());
                check_slots(&what, cache, of_rows);
            });
            assert_close(&what, &values(Tensor::cat(got, 1)), &values(all), 1e-5);
        }
    }
}

#[test]
fn a_cache_of_bands_drops_the_keys_that_no_later_token_reads() {
    let attention = kinds(0.5).into_iter().find(|kind| matches!(kind, sieve_core::Attention::Cowa(_)));
    let attention = attention.expect("it is a kind");
    let (layer, len) = (layer::<Flex>(attention), 1100);
    let rows = Rows::new([1, len], &shape(attention));
    let x = input::<Flex, 3>([1, len, 24], 5);
    let all = one_pass(&layer, &x, &rows.context()).x;
    for parts in [[vec![300], vec![1; 800]].concat(), vec![700, 1, 399], vec![5, 500, 595]] {
        let (got, cache) = outputs_of_parts(&layer, &x, rows.context(), parts.iter().copied(), |_, _, _| {});
        assert_close(&format!("{} parts", parts.len()), &values(Tensor::cat(got, 1)), &values(all.clone()), 1e-5);
        let text = &cache.layers[0];
        let LayerCache::Recent(cache) = text else { panic!("a cache of keys") };
        let held = cache.keys.len();
        assert!(held < 900 && (len - held) % 128 == 0, "whole stages are dropped: {held} of {len} keys are left");
        // In a row of several texts each key lies at its position.
        let mut texts = text.rows(RowsOf::Texts { rows: 2, tokens: len });
        texts.as_cache_mut().expect("a cache").put(1, text, len);
        let LayerCache::Recent(text) = texts.rows(RowsOf::Text { row: 1, tokens: len }) else { panic!("keys") };
        let keys = |x: &sieve_ops::TokenBuffer<Flex, 4>, first, count| x.tokens().narrow(2, first, count).into_data();
        assert_eq!(keys(&text.keys.k, 0, 128), keys(&cache.keys.k, 0, 128));
        assert_eq!(keys(&text.keys.v, len - 16, 16), keys(&cache.keys.v, held - 16, 16));
    }
}

#[test]
fn caches_of_windows_drop_whole_stages_of_keys() {
    // With `--same-bits` kernels go through stages of 128 keys. A cache that begins inside a stage has other stages
    // than the whole row, and so another order of sums.
    let mut dropping = BTreeSet::new();
    for attention in kinds(0.5) {
        let (layer, name) = (layer::<Flex>(attention), attention.kind().name());
        let rows = Rows::new([1, 700], &shape(attention));
        let x = input::<Flex, 3>([1, 700, 24], 5);
        for parts in [vec![300], [vec![300], vec![1; 5]].concat(), vec![200, 500]] {
            let (_, mut cache) = outputs_of_parts(&layer, &x, rows.context(), parts.iter().copied(), |_, _, _| {});
            let len: usize = parts.iter().sum();
            let window = cache.layers[0].as_cache_mut().and_then(|cache| match cache.for_token_step()? {
                TokenCache::Recent(keys) | TokenCache::Branches { window: keys, .. } => Some(keys.len()),
                _ => None,
            });
            let Some(held) = window else { continue };
            assert!((len - held).is_multiple_of(128), "{name}, parts of {parts:?}: {held} of {len} keys are left");
            if held < len {
                dropping.insert(name);
            }
        }
    }
    assert_eq!(dropping, BTreeSet::from(["cowa", "nsa", "swa"]), "kinds whose queries read a window");
}

#[test]
fn a_row_of_several_texts_takes_the_memory_that_is_counted_for_it() {
    let mut compared = 0;
    for attention in kinds(0.5) {
        let (layer, shape) = (layer::<Flex>(attention), shape(attention));
        let (x, rows) = (input::<Flex, 3>([1, 40, 24], 3), Rows::new([1, 40], &shape));
        let (_, cache) = outputs_of_parts(&layer, &x, rows.context(), [40], |_, _, _| {});
        let (num_rows, tokens) = (2, 200);
        let mut texts = cache.layers[0].rows(RowsOf::Texts { rows: num_rows, tokens });
        let numbers = |x: &sieve_ops::TokenBuffer<Flex, 4>| x.buffer().shape().num_elements();
        let of_keys = |keys: &sieve_ops::KeyCache<Flex>| numbers(&keys.k) + numbers(&keys.v);
        let held = match texts.as_cache_mut().and_then(|texts| texts.for_token_step()) {
            Some(TokenCache::Recent(keys)) => of_keys(keys),
            Some(TokenCache::Branches { compressed, selected, window, tail, .. }) => {
                [compressed, selected, window, tail].into_iter().map(|keys| of_keys(keys)).sum()
            }
            // These have no window.
            _ => continue,
        };
        let counted = num_rows as u64 * attention.as_kind().cache_in_row(&shape, tokens, 1);
        assert_eq!(held as u64, counted, "{attention:?}");
        assert!(counted >= num_rows as u64 * attention.as_kind().cache(&shape, tokens, 1)[1], "{attention:?}");
        compared += 1;
    }
    assert_eq!(compared, 6, "dense attention, windows, bands, and three forms of NSA");
}

#[test]
fn steps_choose_the_blocks_of_one_pass() {
    // So that a trainer on a sampler's tokens reads the blocks that the sampler read.
    let mut compared = [0, 0];
    for attention in kinds(0.5) {
        let attention = match attention {
            // Three blocks are read in any case.
            sieve_core::Attention::Nsa(nsa) => sieve_core::Attention::Nsa(NsaShape { num_selected_blocks: 5, ..nsa }),
            other => other,
        };
        let (layer, rows) = (layer::<Flex>(attention), Rows::new([2, 47], &shape(attention)));
        let (context, x) = (rows.context(), input::<Flex, 3>([2, 47, 24], 9));
        let of_rows = layer.as_layer().block_indices(&|| x.clone(), &context, &PassState::default());
        let Some(of_rows) = of_rows else {
            continue;
        };
        outputs_of_parts(&layer, &x, context.clone(), [vec![5], vec![1; 42]].concat(), |cache, state, done| {
            if done == 5 {
                return;
            }
            let chosen = match (&layer, cache) {
                (Attention::Branches(nsa), LayerCache::Blocks(cache)) => {
                    let (coarse, heads) = (nsa.project(x.clone(), &context).compressed, shape(attention).num_heads);
                    let token = coarse.narrow(1, done - 1, 1).narrow(2, 0, heads);
                    cache.choose(token.squeeze_dim(1), nsa.spec())
                }
                _ => state.last_choice.token(0),
            };
            let expected = of_rows.clone().narrow(1, done - 1, 1).into_data();
            let expected: Vec<i32> = expected.iter::<i64>().map(|block| block as i32).collect();
            assert_eq!(chosen.concat(), expected, "{attention:?}, token {}", done - 1);
            compared[0] += 1;
            // Blocks were left out.
            compared[1] += usize::from((done - 1) / 4 + 1 > of_rows.dims()[3]);
        });
    }
    assert_eq!(compared, [8 * 42, 5 * 35 + 3 * 27], "eight kinds");
}

#[test]
fn parts_of_a_text_by_epochs_have_the_bits_of_other_parts_and_keep_the_same_keys() {
    // A cache of 9 keys behind 10 tokens begins a row behind one token of no text, behind 14 tokens behind five.
    for local_window_size in [0, 4] {
        let dma = DmaShape { local_window_size, a_init: 0.5, ..DmaShape::published(9) };
        let attention = sieve_core::Attention::Dma(dma);
        let layer = layer::<Flex>(attention);
        for parts in [vec![3, 7, 1, 12], vec![10, 13], vec![2; 11], vec![14, 140, 2]] {
            let len = parts.iter().sum();
            let rows = Rows::new([2, len], &shape(attention));
            let x = input::<Flex, 3>([2, len, 24], 6);
            let [leaving, epochs] = [KeyOrder::Leaving, KeyOrder::Epochs].map(|keys| {
                let mut context = rows.context();
                context.settings.policy.keys = keys;
                let mut held = Vec::new();
                let (outputs, _) = outputs_of_parts(&layer, &x, context, parts.iter().copied(), |cache, _, _| {
                    let LayerCache::Selected(cache) = cache else { panic!("DMA keeps chosen keys") };
                    held.push(cache.slots.positions.tokens().into_data().iter::<i64>().collect::<Vec<_>>());
                });
                (outputs.into_iter().map(values).collect::<Vec<_>>(), held)
            });
            assert!(leaving == epochs, "{parts:?}, local window {local_window_size}");
        }
    }
}

#[test]
fn a_text_in_parts_gives_the_rows_of_one_pass_with_sinks() {
    for attention in [kinds(0.5)[0], kinds(0.5)[1]] {
        let shape = ModelShape { attention_sinks: true, ..shape(attention) };
        let layer = Attention::<Flex>::new(&shape, &mut WeightInit::new(7, 0.2), &Default::default());
        let grouped = layer.as_layer().as_grouped().expect("a grouped kind");
        assert_eq!(grouped.sinks.as_ref().expect("the shape has sinks").dims(), [6]);
        let x = input::<Flex, 3>([2, 23, 24], 6);
        let rows = Rows::new([2, 23], &shape);
        let all = one_pass(&layer, &x, &rows.context()).x;
        for parts in [vec![3, 7, 1, 12], [vec![4], vec![1; 19]].concat(), vec![1, 22]] {
            let (got, _) = outputs_of_parts(&layer, &x, rows.context(), parts.iter().copied(), |_, _, _| {});
            let what = format!("{attention:?} in parts of {parts:?}");
            assert_close(&what, &values(Tensor::cat(got, 1)), &values(all.clone()), 1e-5);
        }
        // Each row of weights leaves a share to the sink.
        let one = input::<Flex, 3>([1, 9, 24], 6);
        let weights = layer.as_layer().weights(one, &Rows::new([1, 9], &shape).context(), &PassState::default());
        assert!(values(weights.sum_dim(2)).iter().all(|sum| *sum > 0.0 && *sum < 1.0));
    }
}

/// Checks that the slots hold the keys that the mask shows to the last query, with exactly equal ranks.
fn check_slots(what: &str, cache: &LayerCache<Flex>, whole: sieve_ops::DmaAttention<Flex>) {
    let LayerCache::Selected(SlotCache { slots: cache, next_position }) = cache else { panic!("no slots") };
    let len = whole.rank.dims()[2];
    assert_eq!(*next_position, len);
    let slots = cache.len();
    let ranks: Vec<f32> = whole.rank.into_data().iter().collect();
    let expire: Vec<i32> = whole.expire.into_data().iter().collect();
    let held: Vec<f32> = cache.rank.tokens().into_data().iter().collect();
    let positions = cache.positions.tokens().into_data();
    let positions: Vec<usize> = positions.iter::<i64>().map(|at| at as usize).collect();
    for (head, (positions, held)) in positions.chunks(slots).zip(held.chunks(slots)).enumerate() {
        let of_head = |at: usize| head * len + at;
        for (&at, held) in positions.iter().zip(held) {
            assert_eq!(held.to_bits(), ranks[of_head(at)].to_bits(), "{what}: head {head}, key {at}");
        }
        let mut positions = positions.to_vec();
        positions.sort_unstable();
        let seen: Vec<usize> = (0..len).filter(|&at| expire[of_head(at)] as usize == len).collect();
        assert_eq!(positions, seen, "{what}: head {head}");
    }
}

#[test]
fn every_parameter_and_the_input_get_gradients() {
    type Ad = Autodiff<Flex>;
    let config = AttentionConfig::new(24, 6, 3, 8);
    let rows = Rows::<Ad>::new([2, 13], &shape(sieve_core::Attention::Mha));
    let x = input::<Ad, 3>([2, 13, 24], 6).require_grad();
    let layer = config.dynamic_mask::<Ad>(DmaShape::published(4), &Default::default());
    let y = layer.forward(x.clone(), x.zeros_like(), &rows.context(), &mut PassState::default(), None).x;
    let gradients = (y * input([2, 13, 24], 7)).sum().backward();
    let matrix =
        |weight: &burn::module::Param<Tensor<Ad, 2>>| values(weight.val().grad(&gradients).expect("a parameter"));
    for weight in [&layer.qkv.qkv_proj.weight, &layer.o_proj.weight] {
        let gradient = matrix(weight);
        assert!(gradient.iter().all(|dw| dw.is_finite()));
        assert!(gradient.iter().any(|dw| dw.abs() > 1e-6));
    }
    // At A = 0 all scores are 0, whatever W_dt is, so that W_dt gets no gradient.
    assert!(matrix(&layer.dt_proj.weight).iter().all(|&dw| dw == 0.0));
    let da = values(layer.a.val().grad(&gradients).expect("a parameter"));
    assert!(da.iter().all(|da| da.abs() > 1e-9), "{da:?}");
    for norm in [&layer.qkv.q_norm, &layer.qkv.k_norm].map(|norm| norm.as_ref().expect("normed")) {
        let gradient = values(norm.weight.val().grad(&gradients).expect("a parameter"));
        assert!(gradient.iter().all(|dw| *dw != 0.0));
    }
    let dx = values(x.grad(&gradients).expect("the input"));
    assert!(dx.iter().all(|dx| *dx != 0.0));
}

#[test]
fn at_131072_tokens_decoding_ranks_and_keeps_what_the_whole_pass_does() {
    // The ranks of the first head grow to 2048, where f32 numbers are 2^-13 to 2^-12 apart. A fused multiply-add in
    // only one of the two passes would rank keys differently.
    let (len, new) = (131_072, 200);
    let dma = DmaShape {
        bias: DmaBias::Linear,
        recency: DmaRecency::Slope,
        local_window_size: 8,
        longest_period: Some(8192.0),
        a_init: 0.5,
        ..DmaShape::published(64)
    };
    let attention = sieve_core::Attention::Dma(dma);
    let layer = layer::<Flex>(attention);
    let Attention::Ranked(inner) = &layer else { panic!("not DMA") };
    let rows = Rows::new([1, len], &shape(attention));
    let x = input::<Flex, 3>([1, len, 24], 4);
    let all = one_pass(&layer, &x, &rows.context());
    let qkv = inner.qkv.forward(x.clone(), &rows.context());
    let of_rows = inner.masked(qkv, rows.context().documents, inner.spec());
    // The prompt in two parts, then token by token.
    let parts = [len - new - 9000, 9000].into_iter().chain(vec![1; new]);
    let (got, cache) = outputs_of_parts(&layer, &x, rows.context(), parts, |_, _, _| ());
    let last = |y: Tensor<Flex, 3>| y.clone().narrow(1, y.dims()[1] - 1, 1);
    let got = values(Tensor::cat(got.into_iter().skip(1).map(last).collect(), 1));
    let last = all.x.narrow(1, len - new - 1, new + 1);
    assert_close("the last rows", &got, &values(last), 1e-5);
    check_slots("131072 tokens", &cache.layers[0], of_rows);
    let LayerCache::Selected(SlotCache { slots: cache, .. }) = &cache.layers[0] else { panic!("no slots") };
    let positions: Vec<i64> = cache.positions.tokens().into_data().iter().collect();
    for head in positions.chunks(64) {
        let first = *head.iter().min().expect("64 keys") as usize;
        assert!(first < len - 64, "only the last keys are kept");
    }
}

#[test]
fn tokens_after_cached_ones_read_their_blocks_where_the_cached_ones_choose_none() {
    use crate::layer::{KindAttention, Rows as AttendedRows};
    let (len, cached) = (33, 21);
    for attention in kinds(0.5) {
        let Attention::Chosen(layer) = layer::<Flex>(attention) else { continue };
        let rows = Rows::new([2, len], &shape(attention));
        let context = rows.context();
        let packed = layer.project(input::<Flex, 3>([2, len, 24], 2), &context);
        let [all, last] = [0, cached].map(|cached| {
            let rows = AttendedRows { documents: context.documents, first: 0, cached, heads: 0..6, context: &context };
            let (o, _) = layer.attend(packed.clone(), &rows, &mut PassState::default());
            (o.clone().narrow(1, 0, cached.max(1)), o.narrow(1, 21, len - 21))
        });
        assert_eq!(values(all.1.flatten::<3>(2, 3)), values(last.1.flatten::<3>(2, 3)), "{attention:?}");
        // A token that chooses no block reads nothing.
        assert!(values(last.0.flatten::<3>(2, 3)).iter().all(|&x| x == 0.0), "{attention:?}");
    }
}

/// Divisions of 23 tokens into parts.
const PARTS: [&[usize]; 6] = [&[3, 7, 1, 12], &[1, 2, 2, 18], &[10, 13], &[22, 1], &[9, 1, 1, 2, 10], &[2, 5, 5, 5, 6]];

#[test]
fn parts_behind_latents_have_the_outputs_of_one_pass() {
    use crate::kv_cache::CachedRows;
    use crate::layer::{Cached, PerToken, Rows as AttendedRows};
    for qk_norm in [false, true] {
        // On a GPU the cache holds latents.
        let attention = sieve_core::Attention::Mla(MlaShape { qk_norm, ..MlaShape::published(8) });
        let Attention::Latent(layer) = layer::<Flex>(attention) else { panic!("latents") };
        let rows = Rows::new([2, 23], &shape(attention));
        let (context, x) = (rows.context(), input::<Flex, 3>([2, 23, 24], 6));
        let packed = layer.project(x, &context);
        let whole = AttendedRows { documents: context.documents, first: 0, cached: 0, heads: 0..6, context: &context };
        let (all, ()) = layer.attend(packed.clone(), &whole, &mut PassState::default());
        let part = |first, count| packed.clone().change(&|x| x.narrow(1, first, count));
        for parts in PARTS {
            let (mut cache, mut scratch) = (layer.cache_of_latents(part(0, parts[0])), Default::default());
            let mut done = parts[0];
            for &new in &parts[1..] {
                let rows = CachedRows { rows: [0, 2], cache: &mut cache, scratch: &mut scratch };
                let state = &mut PassState::default();
                let o = layer.attend_cached(part(done, new), Cached { rows, context: &context, state });
                let [got, expected] = [o, all.clone().narrow(1, done, new)].map(|o| values(o.flatten::<3>(2, 3)));
                let what = format!("norm {qk_norm}, {new} of {parts:?} behind {done}");
                assert_close(&what, &got, &expected, 1e-5);
                if new > 1 && !qk_norm {
                    assert_eq!(got, expected, "{what}");
                }
                done += new;
            }
            assert_eq!(cache.num_keys(), 23);
        }
    }
}

#[test]
fn parts_behind_blocks_have_the_outputs_of_one_pass() {
    use crate::kv_cache::CachedRows;
    use crate::layer::{Cached, PerToken, Rows as AttendedRows};
    let mut compared = 0;
    for attention in kinds(0.5) {
        let Attention::Branches(layer) = layer::<Flex>(attention) else { continue };
        let rows = Rows::new([2, 23], &shape(attention));
        let (context, x) = (rows.context(), input::<Flex, 3>([2, 23, 24], 6));
        let packed = layer.project(x, &context);
        let attend = |first, count| {
            let part = packed.clone().change(&|x| x.narrow(1, first, count));
            let documents = Documents::whole_rows([2, count], &Default::default());
            let rows = AttendedRows { documents: &documents, first: 0, cached: 0, heads: 0..6, context: &context };
            (part.clone(), layer.attend(part, &rows, &mut PassState::default()))
        };
        let (_, (all, _)) = attend(0, 23);
        for parts in PARTS {
            let (begun, (_, pooled)) = attend(0, parts[0]);
            let (mut cache, mut scratch) = (layer.fill(begun, pooled), Default::default());
            let mut done = parts[0];
            for &new in &parts[1..] {
                let (part, state) = (packed.clone().change(&|x| x.narrow(1, done, new)), &mut PassState::default());
                // Several tokens attend as on a GPU.
                let o = match &mut cache {
                    LayerCache::Blocks(cache) if new > 1 => layer.attend_in_row(part, cache, &context, state),
                    cache => {
                        let rows = CachedRows { rows: [0, 2], cache, scratch: &mut scratch };
                        layer.attend_cached(part, Cached { rows, context: &context, state })
                    }
                };
                let [got, expected] = [o, all.clone().narrow(1, done, new)].map(|o| values(o.flatten::<3>(2, 3)));
                assert_eq!(got, expected, "{attention:?}, {new} of {parts:?} behind {done}");
                done += new;
                compared += new;
            }
            assert_eq!(cache.num_keys(), 23);
        }
    }
    assert!(compared > 0, "nsa is a kind");
}
