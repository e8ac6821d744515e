//! `sieve kernels run block_sparse`: attention under a selector's mask, with the mask's arrays.
use super::branches::Tensors;
use crate::case::Case;
use crate::device::{Device, Gpu, mask_data, separate};
use crate::error::{Result, refused};
use crate::shape::{keys_of, prompt_shape, queries_of, values_of};
use burn::tensor::DType;
use sieve_core::MaskLayout;
use sieve_hf::NamedTensor;
use sieve_kernels::AttentionShape;
use sieve_select::{Call, Phase, Selector, SparseMask, block_sparse_attention};

/// What a call computed.
pub(super) struct Masked {
    layout: MaskLayout,
    data: Vec<i32>,
    o: Vec<f32>,
    lse: Vec<f32>,
    /// Where blocks were chosen and attention computed.
    on_device: [bool; 2],
}

/// Refuses calls that have no mask.
pub(super) fn check(selector: Option<&Selector>, shape: &AttentionShape) -> Result<Selector> {
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
    Ok(selector.clone())
}

fn on_host<'a>(selector: &Selector, case: &'a Case) -> Result<(Call<'a>, SparseMask)> {
    let call = Call::new(prompt_shape(&case.shape), &case.q, &case.k, &case.v);
    let made = call.and_then(|call| Ok((call, selector.select_uncorrected(&call)?)));
    made.or_else(|error| refused(error.to_string()))
}

pub(super) fn on_cpu(selector: &Selector, case: &Case) -> Result<Masked> {
    let (call, mask) = on_host(selector, case)?;
    let done = block_sparse_attention(&call, &mask).and_then(|out| Ok((out, mask.packed()?)));
    let (output, packed) = done.or_else(|error| refused(error.to_string()))?;
    Ok(Masked {
        layout: packed.layout().clone(),
        data: packed.data().to_vec(),
        o: output.o,
        lse: output.lse,
        on_device: [false; 2],
    })
}

pub(super) fn on_cuda(selector: &Selector, case: &Case, device: &Gpu) -> Result<Masked> {
    let qkv = separate(device, [&case.q, &case.k, &case.v], case.shape);
    let selection = selector.block_selection(prompt_shape(&case.shape), 0, 1);
    let chosen = selection.map(|of| qkv.select_blocks(&of, None)).transpose()?;
    let (layout, on, is_chosen) = match chosen {
        Some(chosen) => (chosen.layout, chosen.data, true),
        None => {
            let packed = on_host(selector, case)?.1.packed();
            let packed = packed.or_else(|error| refused(error.to_string()))?;
            (packed.layout().clone(), mask_data(device, &packed), false)
        }
    };
    let out = qkv.sparse_attention_forward(&layout, &on, case.scale)?;
    Ok(Masked {
        data: device.ints(&on)?,
        layout,
        o: device.floats(&out.o)?,
        lse: device.floats(&out.lse)?,
        on_device: [is_chosen, true],
    })
}

impl Masked {
    /// The tensors of a file; absent arrays are left out.
    pub(super) fn tensors(&self, case: &Case) -> Vec<NamedTensor> {
        let s = &case.shape;
        let (n, lists) = (s.seq_len, s.num_heads / self.layout.heads_per[0]);
        let mut tensors = Tensors::new(match self.on_device[1] {
            true => DType::BF16,
            false => DType::F32,
        });
        tensors.floats("q", &case.q, &queries_of(*s), DType::BF16);
        tensors.floats("k", &case.k, &keys_of(*s), DType::BF16);
        tensors.floats("v", &case.v, &values_of(*s), DType::BF16);
        tensors.output("o", &self.o, &s.output());
        tensors.floats("lse", &self.lse, &s.lse(), DType::F32);
        let [.., tiles] = self.layout.cuts;
        let [_, row_ptr, tile_idx, col_ptr, col_idx, key_order, query_order, windows] = self.layout.places;
        let starts = lists * tiles;
        let last = |place: usize| match place {
            0 => 0,
            place => self.data[place + starts] as usize,
        };
        let orders = s.num_heads / self.layout.heads_per[1];
        for (name, place, shape) in [
            ("row_ptr", row_ptr, vec![starts + 1]),
            ("tile_idx", tile_idx, vec![last(row_ptr)]),
            ("col_ptr", col_ptr, vec![starts + 1]),
            ("col_idx", col_idx, vec![last(col_ptr)]),
            ("key_order", key_order, vec![orders, n]),
            ("query_order", query_order, vec![s.num_heads, n]),
            ("windows", windows, vec![lists, 2]),
        ] {
            let size = shape.iter().product();
            if place > 0 && size > 0 {
                tensors.ints(name, self.data[place..][..size].to_vec(), &shape);
            }
        }
        tensors.list
    }

    /// What the arrays mean.
    pub(super) fn metadata(&self, selector: &Selector) -> Vec<(&'static str, String)> {
        let [query_tile, query_offset, key_tile, tiles] = self.layout.cuts;
        let [per_list, per_order] = self.layout.heads_per;
        let dense = self.layout.dense_rows.iter();
        let dense: Vec<String> = dense.map(|r| format!("{}..{}", r.start, r.end)).collect();
        let place = |on_device: bool| if on_device { "GPU" } else { "CPU" };
        let [chosen, attended] = self.on_device.map(place);
        vec![
            ("selector", selector.label()),
            ("chosen_on", chosen.to_owned()),
            ("attended_on", attended.to_owned()),
            ("query_tile", query_tile.to_string()),
            ("query_offset", query_offset.to_string()),
            ("key_tile", key_tile.to_string()),
            ("query_tiles", tiles.to_string()),
            ("heads_per_list", per_list.to_string()),
            ("heads_per_order", per_order.to_string()),
            ("dense_rows", dense.join(" ")),
        ]
    }
}
