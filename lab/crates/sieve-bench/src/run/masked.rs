//! `sieve kernels run block_sparse`: attention under a selector's mask, with the mask's arrays.
use super::branches::Tensors;
use crate::case::Case;
use crate::device::{Device, Gpu, download_mask, separate, upload_mask};
use crate::error::{Result, refused};
use crate::shape::prompt_shape;
use burn::tensor::DType;
use sieve_core::KeyMask;
use sieve_hf::NamedTensor;
use sieve_kernels::AttentionShape;
use sieve_select::{Call, Phase, Selected, Selector, block_sparse_attention};
use std::ops::Range;

/// Mask and outputs of attention under a selector's mask.
pub(super) struct Masked {
    mask: KeyMask,
    o: Vec<f32>,
    lse: Vec<f32>,
    /// Whether the GPU chose the blocks, and whether it computed the attention.
    on_device: [bool; 2],
}

/// Refuses selectors without a mask and shapes that no mask fits.
pub(super) fn check(selector: Option<&Selector>, shape: &AttentionShape) -> Result<()> {
    let Some(selector) = selector else {
        return refused("block_sparse needs --selector: the method that chooses\n  hint: --selector help");
    };
    if selector.phase() == Phase::Decode {
        let name = selector.name();
        return refused(format!("{name} acts while decoding: it has no mask"));
    }
    if shape.batch != 1 || shape.head_dim != shape.head_dim_v {
        return refused("block_sparse takes one row, whose keys and values have one width");
    }
    Ok(())
}

fn on_host<'a>(selector: &Selector, case: &'a Case) -> Result<(Call<'a>, Selected)> {
    let call = Call::new(prompt_shape(&case.shape), &case.q, &case.k, &case.v);
    let made = call.and_then(|call| Ok((call, selector.select_uncorrected(&call)?)));
    made.or_else(|error| refused(error.to_string()))
}

pub(super) fn on_cpu(selector: &Selector, case: &Case) -> Result<Masked> {
    let (call, chosen) = on_host(selector, case)?;
    let done = block_sparse_attention(&call, &chosen).and_then(|out| Ok((out, chosen.mask.for_kernels()?)));
    let (output, mask) = done.or_else(|error| refused(error.to_string()))?;
    Ok(Masked { mask, o: output.o, lse: output.lse, on_device: [false; 2] })
}

/// Computes the attention on the GPU; its kernels also choose the keys if they have the selector's method, otherwise
/// the CPU does.
pub(super) fn on_cuda(selector: &Selector, case: &Case, device: &Gpu) -> Result<Masked> {
    let qkv = separate(device, [&case.q, &case.k, &case.v], case.shape);
    let (layer, num_layers) = (0, 1);
    let selection = selector.block_selection(prompt_shape(&case.shape), layer, num_layers);
    let chosen = selection.map(|of| qkv.select_blocks(&of)).transpose()?;
    let (mask, is_chosen) = match chosen {
        Some(chosen) => (chosen.mask, true),
        None => {
            let mask = upload_mask(device, &on_host(selector, case)?.1.mask);
            (mask.or_else(|error| refused(error.to_string()))?, false)
        }
    };
    let out = qkv.sparse_attention_forward(&mask, case.scale)?;
    Ok(Masked {
        mask: download_mask(device, mask)?,
        o: device.floats(&out.o)?,
        lse: device.floats(&out.lse)?,
        on_device: [is_chosen, true],
    })
}

impl Masked {
    /// The tensors of the file; arrays that the mask does not have are left out.
    pub(super) fn tensors(&self, case: &Case) -> Vec<NamedTensor> {
        let s = &case.shape;
        let (n, mask, places) = (s.seq_len, &self.mask, &self.mask.places);
        let mut tensors = Tensors::new(if self.on_device[1] { DType::BF16 } else { DType::F32 });
        tensors.qkv(case);
        tensors.output("o", &self.o, &s.output());
        tensors.floats("lse", &self.lse, &s.lse(), DType::F32);
        let num_rows = mask.num_lists() * mask.tiles.num_query_tiles();
        // On a device an index array is longer than its entries: the last word of its pointer array is their number.
        let num_entries = |pointers: &Range<usize>| {
            if pointers.is_empty() { 0 } else { mask.words[pointers.start + num_rows] as usize }
        };
        let orders = s.num_heads / mask.heads_per_order;
        for (name, place, shape) in [
            ("row_ptr", &places.row_ptr, vec![num_rows + 1]),
            ("tile_idx", &places.tile_idx, vec![num_entries(&places.row_ptr)]),
            ("col_ptr", &places.col_ptr, vec![num_rows + 1]),
            ("col_idx", &places.col_idx, vec![num_entries(&places.col_ptr)]),
            ("key_order", &places.key_order, vec![orders, n]),
            ("query_order", &places.query_order, vec![s.num_heads, n]),
            ("windows", &places.windows, vec![mask.num_lists(), 2]),
        ] {
            let size = shape.iter().product();
            if !place.is_empty() && size > 0 {
                tensors.ints(name, mask.words[place.start..][..size].to_vec(), &shape);
            }
        }
        tensors.list
    }

    /// Metadata that a reader needs to decode the mask's arrays.
    pub(super) fn metadata(&self, selector: &Selector) -> Vec<(&'static str, String)> {
        let (mask, tiles) = (&self.mask, self.mask.tiles);
        let dense = mask.dense_rows.iter();
        let dense: Vec<String> = dense.map(|r| format!("{}..{}", r.start, r.end)).collect();
        let place = |on_device: bool| if on_device { "GPU" } else { "CPU" };
        let [chosen, attended] = self.on_device.map(place);
        vec![
            ("selector", selector.label()),
            ("chosen_on", chosen.to_owned()),
            ("attended_on", attended.to_owned()),
            ("query_tile", tiles.query_tile.to_string()),
            ("query_offset", tiles.query_offset.to_string()),
            ("key_tile", tiles.key_tile.to_string()),
            ("query_tiles", tiles.num_query_tiles().to_string()),
            ("heads_per_list", mask.heads_per_list.to_string()),
            ("heads_per_order", mask.heads_per_order.to_string()),
            ("dense_rows", dense.join(" ")),
        ]
    }
}
