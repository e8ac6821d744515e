//! Damaged safetensors files: the reader accepts or refuses each one, and never reads outside the file.
use crate::damaged_texts::{each_within, quick_dir};
use burn::tensor::TensorData;
use sieve_hf::{NamedTensor, TensorFile, write_tensor_file};
use std::fs;

#[test]
fn damaged_headers_are_refused_or_name_tensors_that_are_there() {
    let dir = quick_dir();
    let path = dir.path().join("model.safetensors");
    let tensor = |name: &str, shape: [usize; 2]| {
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|n| n as f32).collect();
        let data = TensorData::new(values, shape);
        NamedTensor { name: name.to_owned(), data }
    };
    let tensors = [
        tensor("model.embed_tokens.weight", [7, 4]),
        tensor("model.norm.weight", [1, 4]),
        tensor("lm_head.weight", [3, 5]),
    ];
    write_tensor_file(&path, &tensors, None).expect("writable");
    let whole = fs::read(&path).expect("readable");
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().expect("eight bytes")) as usize;

    each_within(&whole, header, |bytes| {
        fs::write(&path, bytes).expect("writable");
        let file = match TensorFile::open(&path) {
            Ok(file) => file,
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("model.safetensors"), "{text}");
                return false;
            }
        };
        let mut num_bytes = 0;
        for name in file.names() {
            // A damaged dtype name must be an error. An accepted tensor has as many bytes as its shape and dtype take.
            if let Ok(data) = file.any_tensor(&name) {
                let count: usize = data.shape.to_vec().iter().product();
                assert_eq!(data.bytes.len(), count * data.dtype.size(), "{name}");
                num_bytes += data.bytes.len();
            }
            let wrong = file.tensor(&name, &[9, 9, 9]);
            assert!(wrong.is_err(), "{name}");
        }
        assert!(num_bytes <= bytes.len() - 8);
        true
    });
}
