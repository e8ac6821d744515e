//! Weights that a device holds whole only while a pass reads them: of a model that is divided among several devices.
use crate::{DecoderLayer, LmHead, TokenEmbedding};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Gathers the weights of a part of a model for one use of it. The part's own parameters are those that the model keeps
/// between two uses, which may have no values.
pub trait WholeWeights<B: Backend>: fmt::Debug + Send + Sync {
    /// The embedding with whole weights.
    fn embedding(&self, part: &TokenEmbedding<B>) -> TokenEmbedding<B>;
    /// A decoder layer with whole weights.
    fn layer(&self, part: &DecoderLayer<B>) -> DecoderLayer<B>;
    /// The final norm and the output projection with whole weights, unless the embedding's are used.
    fn head(&self, part: &LmHead<B>) -> LmHead<B>;
    /// The first device's logits, on all devices. The devices' own may differ in the last bits: two devices could
    /// choose different tokens, and a text could end on one of them, while the other still waits for its pieces of the
    /// weights.
    fn agreed(&self, logits: Tensor<B, 3>) -> Tensor<B, 3>;
}

/// Where a model's whole weights come from; by default from its own parameters. The type does not name the backend,
/// because a module has the same fields with and without gradients.
#[derive(Clone, Default)]
pub(crate) struct WeightSource(Option<Arc<dyn Any + Send + Sync>>);

impl WeightSource {
    pub(crate) fn new<B: Backend>(source: Box<dyn WholeWeights<B>>) -> Self {
        Self(Some(Arc::new(source)))
    }

    /// `None` if the model's own parameters are whole.
    pub(crate) fn of<B: Backend>(&self) -> Option<&dyn WholeWeights<B>> {
        let source = self.0.as_ref()?.downcast_ref::<Box<dyn WholeWeights<B>>>();
        Some(source.expect("divided weights are for passes without gradients").as_ref())
    }
}

impl fmt::Debug for WeightSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WeightSource").field(&self.0.is_some()).finish()
    }
}
