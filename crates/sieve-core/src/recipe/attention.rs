//! `[attention]`: the model's own kind, and the kinds of layers that have another.

use std::collections::BTreeMap;
use std::ops::Deref;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use toml::{Table, Value};

use super::StageSection;
use super::sections::{OWN_LAYER, SHARED_LAYER};
use crate::BlockChoice;
use crate::keys::{KeyValue, Kind};
use crate::kinds::{ATTENTION_KEYS, Attention, kind_of_layer_type, table_name};
use crate::model::{LayerPattern, LayerType};

/// `[attention]`, which reads as the model's own kind, and its tables `[attention.NAME]`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttentionSection {
    /// The model's own kind: that of every layer to which `model.layer_types` gives no other.
    #[serde(flatten)]
    pub own: Attention,
    /// The kinds of other layers, by their names in `model.layer_types`.
    #[serde(flatten)]
    pub others: BTreeMap<String, Attention>,
}

/// What a name in `model.layer_types` stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LayerName {
    /// A layer of the model's own kind.
    Own,
    /// A layer that reads the blocks that an earlier layer chose.
    Shared,
    /// A layer of another kind.
    Other(Attention),
}

impl AttentionSection {
    /// The model's own kind, then those of other layers.
    pub fn kinds(&self) -> impl Iterator<Item = Attention> {
        std::iter::once(self.own).chain(self.others.values().copied())
    }

    /// How queries choose blocks, in the first of the [kinds](Self::kinds) whose queries do.
    pub(super) fn block_choice(&self) -> Option<BlockChoice> {
        self.kinds().find_map(|kind| kind.as_kind().block_choice())
    }

    /// What `name` in `model.layer_types` stands for; `None` if no layer has this name.
    pub(super) fn layer_named(&self, name: &str) -> Option<LayerName> {
        match name {
            OWN_LAYER => return Some(LayerName::Own),
            SHARED_LAYER => return Some(LayerName::Shared),
            _ => {}
        }
        if let Some(other) = self.others.get(table_name(name)) {
            return Some(LayerName::Other(*other));
        }
        let kind = kind_of_layer_type(name)?;
        // A dense layer has no settings, and so needs no table.
        let dense = (kind == Attention::DENSE.kind()).then_some(LayerName::Other(Attention::DENSE));
        if kind == self.own.kind() { Some(LayerName::Own) } else { dense }
    }

    /// The attention of a checked stage. `windows` of the stage changes tables of layers; then the stage's kind
    /// replaces the model's own, and `window` and `index_warmup` change that kind. The former kind becomes a table of
    /// its own name, so that `model.layer_types` may still name it.
    pub(super) fn of_stage(&self, stage: &StageSection) -> Self {
        let mut section = self.clone();
        for (name, &window) in stage.windows.iter().flatten() {
            if let Some(table) = section.others.get_mut(table_name(name)) {
                *table = table.with_window(window);
            }
        }
        if let Some(LayerName::Other(own)) = stage.kind.as_deref().and_then(|kind| section.layer_named(kind)) {
            let former = std::mem::replace(&mut section.own, own);
            section.others.entry(former.kind().name().to_owned()).or_insert(former);
        }
        if let Some(window) = stage.window {
            section.own = section.own.with_window(window);
        }
        if let Some(warms_up) = stage.index_warmup {
            section.own = section.own.with_index_warmup(warms_up);
        }
        section
    }

    /// The kinds of the layers ([`ModelShape::layers`](crate::ModelShape::layers)) that the checked value of
    /// `model.layer_types` names.
    pub(super) fn pattern(&self, layer_types: &[String]) -> LayerPattern {
        // A shared layer has the kind of the layer whose choice it reads: the last one before it that chooses blocks.
        let mut chooser = LayerType::OWN;
        let types = layer_types.iter().map(|name| {
            let of = match self.layer_named(name) {
                Some(LayerName::Shared) => return LayerType { is_shared: true, ..chooser },
                Some(LayerName::Other(other)) => LayerType::of(other),
                Some(LayerName::Own) | None => LayerType::OWN,
            };
            if of.other.unwrap_or(self.own).as_kind().block_choice().is_some() {
                chooser = of;
            }
            of
        });
        LayerPattern::new(self.own, types)
    }
}

impl Deref for AttentionSection {
    type Target = Attention;

    fn deref(&self) -> &Attention {
        &self.own
    }
}

impl From<Attention> for AttentionSection {
    fn from(own: Attention) -> Self {
        Self { own, others: BTreeMap::new() }
    }
}

impl KeyValue for AttentionSection {
    const KIND: Kind = Kind::Table(&ATTENTION_KEYS);
}

impl<'de> Deserialize<'de> for AttentionSection {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // No key of a kind has a table as its value, so every table is one of [attention.NAME].
        let (tables, own): (Table, Table) =
            Table::deserialize(from)?.into_iter().partition(|(_, value)| value.is_table());
        let read = |value: Value| value.try_into().map_err(D::Error::custom);
        let others = tables.into_iter().map(|(name, table)| Ok((name, read(table)?)));
        Ok(Self { own: read(Value::Table(own))?, others: others.collect::<Result<_, D::Error>>()? })
    }
}
