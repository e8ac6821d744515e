//! How a class stores a tensor's weights.
use burn::tensor::{DType, TensorData};

/// How a class stores the weights w of a tensor: those from a row on as `(w + add) * times`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Form {
    pub(crate) from_row: usize,
    pub(crate) add: f32,
    pub(crate) times: f32,
}

impl Form {
    /// The weights as they are.
    pub(crate) const PLAIN: Self = Self { from_row: 0, add: 0.0, times: 1.0 };

    /// The values that the class stores.
    pub(crate) fn stored(self, data: TensorData) -> TensorData {
        self.changed(data, |weight| (weight + self.add) * self.times)
    }

    /// The weights whose stored values these are.
    pub(crate) fn weights(self, data: TensorData) -> TensorData {
        self.changed(data, |stored| stored / self.times - self.add)
    }

    /// Changes the values in f32; plain ones stay of their type.
    fn changed(self, data: TensorData, change: impl Fn(f32) -> f32) -> TensorData {
        if self == Self::PLAIN {
            return data;
        }
        let width: usize = data.shape[1..].iter().product();
        let mut data = data.convert_dtype(DType::F32);
        let values = data.as_mut_slice::<f32>().expect("converted to f32");
        values[self.from_row * width..].iter_mut().for_each(|value| *value = change(*value));
        data
    }
}
