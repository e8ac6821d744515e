//! Logits of a whole document, for comparison with other programs; and the log-probability of a token by its logits.
use crate::InferError;
use crate::continuation::Drawn;
use crate::input::{check_row, ids};
use burn::tensor::{DType, Int, Tensor, TensorData};
use sieve_core::Draw;
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{DeviceBackend, Documents};

/// Logits of every position of one document, f32 `[1, num_tokens, vocab_size]`, by one full forward pass.
///
/// # Errors
/// No token, a token outside the vocabulary, more tokens than the model's context.
pub fn logits<B: DeviceBackend>(
    model: &Qwen3<B>,
    tokens: &[u32],
    device: &B::Device,
) -> Result<TensorData, InferError> {
    let (num_tokens, shape) = (tokens.len(), model.shape());
    check_row(tokens, num_tokens, shape)?;
    let documents = Documents::whole_rows([1, num_tokens], device);
    let rope = model.rope(num_tokens, device);
    let context = LayerContext::new(&documents, &rope);
    let logits = model.logits(ids(tokens, [1, num_tokens], device), &context);
    Ok(logits.into_data().convert::<f32>())
}

/// The logits of the next token of some texts, a row each, on the device, and those of some rows on the host.
#[derive(Clone, Debug)]
pub struct NextLogits<B: DeviceBackend> {
    on_device: Tensor<B, 2>,
    /// The rows on the host, ascending.
    rows: Vec<usize>,
    on_host: Vec<f32>,
}

impl<B: DeviceBackend> NextLogits<B> {
    /// Copies logits `[rows, vocab_size]` to the host.
    pub(crate) fn new(on_device: Tensor<B, 2>) -> Self {
        let rows = (0..on_device.dims()[0]).collect();
        Self { on_host: on_host(on_device.clone()), rows, on_device }
    }

    /// One row of logits, `[1, vocab_size]`, which is on the host already.
    pub(crate) fn of_one(on_device: Tensor<B, 2>, on_host: Vec<f32>) -> Self {
        Self { on_device, rows: vec![0], on_host }
    }

    /// Copies only `rows`, ascending, to the host: all rows of a batch may be as large as the model's weights.
    pub(crate) fn with_rows(on_device: Tensor<B, 2>, rows: Vec<usize>) -> Self {
        if rows.len() == on_device.dims()[0] {
            return Self::new(on_device);
        }
        let on_host = match rows[..] {
            [] => Vec::new(),
            _ => {
                let indices: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
                let indices = Tensor::<B, 1, Int>::from_data(indices.as_slice(), &on_device.device());
                on_host(on_device.clone().select(0, indices))
            }
        };
        Self { on_host, rows, on_device }
    }

    /// Number of rows.
    pub fn num_rows(&self) -> usize {
        self.on_device.dims()[0]
    }

    /// The logits of a row, f32 `[vocab_size]`.
    ///
    /// # Panics
    /// Where the row is on the device alone.
    pub fn row(&self, row: usize) -> &[f32] {
        self.row_on_host(row).expect("the row was copied to the host")
    }

    /// The logits of a row, f32 `[vocab_size]`; `None` where they are on the device alone.
    pub(crate) fn row_on_host(&self, row: usize) -> Option<&[f32]> {
        let [_, vocab_size] = self.on_device.dims();
        let at = self.rows.binary_search(&row).ok()?;
        Some(&self.on_host[at * vocab_size..][..vocab_size])
    }

    /// The token that each draw takes among the first `num_tokens` of its row, on the device; `None` after a NaN or
    /// infinite logit.
    pub(crate) fn draw(&self, draws: &[Draw], num_tokens: usize) -> Vec<Option<u32>> {
        sieve_ops::draw(self.on_device.clone(), draws, num_tokens)
    }

    /// The token that was drawn for each row, if there is one, with its log-probability if `with_scores`: the negative
    /// of [`Qwen3::token_losses_of`], where this has the same logits, to the bit.
    ///
    /// # Panics
    /// Where `tokens` has not one entry for each row, with `with_scores`.
    pub fn scored(&self, tokens: Vec<Option<u32>>, with_scores: bool) -> Vec<Drawn> {
        scored(self.on_device.clone(), tokens, with_scores)
    }
}

/// As [`NextLogits::scored`], of logits that are on the device alone.
pub(crate) fn scored<B: DeviceBackend>(
    logits: Tensor<B, 2>,
    tokens: Vec<Option<u32>>,
    with_scores: bool,
) -> Vec<Drawn> {
    let losses = if with_scores {
        // A row without a token gets the loss of token 0, which nobody reads.
        let of_rows: Vec<u32> = tokens.iter().map(|token| token.unwrap_or(0)).collect();
        sieve_ops::losses_of_logits(logits, &of_rows)
    } else {
        vec![f64::NAN; tokens.len()]
    };
    let of_row =
        |(token, loss): (Option<u32>, f64)| Drawn { token, log_probability: token.map_or(f64::NAN, |_| -loss) };
    tokens.into_iter().zip(losses).map(of_row).collect()
}

/// Logits as f32 on the host. The device converts them: on the host that would take longer than the forward pass.
pub(crate) fn on_host<B: DeviceBackend>(logits: Tensor<B, 2>) -> Vec<f32> {
    let logits = logits.cast(DType::F32).into_data();
    logits.into_vec().expect("they were converted")
}

/// The natural logarithm of a token's probability by the logits before it: on a CPU the same number, to the bit, as the
/// negative of [`Qwen3::token_losses_of`].
pub(crate) fn log_probability(logits: &[f32], token: u32) -> f64 {
    -f64::from(sieve_ops::token_loss_on_host(logits, token))
}
