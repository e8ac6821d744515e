//! How BA-Att's block scores agree with dense attention on one prompt.
use crate::EvalError;
use serde::Serialize;
use sieve_infer::chunks::call;
use sieve_infer::input::check_vocabulary;
use sieve_infer::pass::attending_pass;
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;
use sieve_select::prefill::ba_att::HeadAgreement;
use sieve_select::{LayerSelectors, Method, dense_attention};

/// Agreement of the block scores of `ba_att` with attention: means over the query heads of the dense layers that it
/// selects in. See [`HeadAgreement`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BlockAgreement {
    /// All settings, in the form that `--selector` reads.
    pub selector: String,
    /// Number of tokens of the prompt.
    pub num_tokens: usize,
    /// Number of query heads, over all layers.
    pub heads: usize,
    /// Pairs of a query block and a key block, over all heads.
    pub pairs: usize,
    /// Mean over the heads of the correlation of the bound U with the error that it bounds; `None` where no head has
    /// one.
    pub bound: Option<f64>,
    /// The largest error divided by its U, over all heads: at most 1.
    pub largest_of_bound: f64,
    /// Mean over the heads of the correlation of a block's estimated share with its share of attention.
    pub mass: Option<f64>,
}

impl BlockAgreement {
    /// Means over `heads`: the query heads of all layers that the selector selects in.
    fn of(selector: &LayerSelectors, num_tokens: usize, heads: &[HeadAgreement]) -> Self {
        let mean = |of: fn(&HeadAgreement) -> Option<f64>| {
            let found: Vec<f64> = heads.iter().filter_map(of).collect();
            (!found.is_empty()).then(|| found.iter().sum::<f64>() / found.len() as f64)
        };
        Self {
            selector: selector.to_string(),
            num_tokens,
            heads: heads.len(),
            pairs: heads.iter().map(|head| head.pairs).sum(),
            bound: mean(|head| head.bound),
            largest_of_bound: heads.iter().map(|head| head.largest_of_bound).fold(0.0, f64::max),
            mass: mean(|head| head.mass),
        }
    }
}

/// The agreement of each selector's block scores with dense attention on one prompt; `None` for a selector that is not
/// `ba_att` in any dense layer. `window` is the prompt and the token after it.
///
/// # Errors
/// A token outside the vocabulary, settings that do not fit the prompt.
pub fn block_agreement<B: DeviceBackend>(
    model: &Qwen3<B>,
    window: &[u32],
    selectors: &[LayerSelectors],
    device: &B::Device,
) -> Result<Vec<Option<BlockAgreement>>, EvalError> {
    check_vocabulary(window, model.shape().vocab_size)?;
    let mut heads: Vec<Vec<HeadAgreement>> = vec![Vec::new(); selectors.len()];
    attending_pass(model, window, device, &mut |operands| {
        let call = call(operands)?;
        for (selector, heads) in selectors.iter().zip(&mut heads) {
            let selector = selector.of(call.layer);
            if let Method::BaAtt(config) = &selector.method
                && !selector.is_dense_layer(call.layer)
            {
                heads.extend(config.agreement(&call)?);
            }
        }
        Ok(dense_attention(&call)?.o)
    })?;
    let num_tokens = window.len() - 1;
    let all = selectors.iter().zip(&heads);
    Ok(all.map(|(of, heads)| (!heads.is_empty()).then(|| BlockAgreement::of(of, num_tokens, heads))).collect())
}
