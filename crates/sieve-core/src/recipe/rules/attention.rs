//! Rules of `[attention]`.

use super::broken::Rules;
use crate::did_you_mean;
use crate::keys::MAX_SEQ_LEN;
use crate::kinds::{AttentionKind, Projections, kind_of_layer_type, names_of_kinds, table_name};
use crate::recipe::attention::LayerName;
use crate::recipe::mistake::{Mistake, quoted};
use crate::recipe::sections::{OWN_LAYER, SHARED_LAYER};
use crate::recipe::{Attention, AttentionSection, ModelSection, StageSection};

/// Checks the numbers of `[attention]`, or of a table in it, and the rules between them.
pub(super) fn check_attention(attention: &Attention, model: Option<&ModelSection>, rules: &mut Rules<'_>) {
    attention.check_bounds(rules);
    attention.check(model, rules);
}

/// Checks the tables `[attention.NAME]` by the rules of `[attention]`, and that some layer has the kind of each.
pub(super) fn check_layer_tables(
    section: &AttentionSection,
    model: Option<&ModelSection>,
    stages: &[StageSection],
    rules: &mut Rules<'_>,
) {
    for (name, attention) in &section.others {
        let path = format!("attention.{name}");
        let mut mistakes = Vec::new();
        let mut own = Rules(&mut mistakes);
        check_attention(attention, model, &mut own);
        own.require(
            attention.index_warmup() != Some(true),
            "attention.index_warmup",
            "is true, and stages change only the warm-up of [attention]",
            "make it the kind of [attention], or leave it out",
        );
        let of_table = |text: String| text.replace("attention.", &format!("{path}."));
        let placed = mistakes.into_iter().map(|mistake| Mistake {
            key: of_table(mistake.key),
            hint: of_table(mistake.hint),
            ..mistake
        });
        rules.0.extend(placed);
        let types = model.map(|model| model.layer_types.as_deref().unwrap_or_default());
        let of_stages = stages.iter().flat_map(|stage| stage.kind.iter().chain(stage.layer_types.iter().flatten()));
        let is_used = types.is_none_or(|types| types.iter().chain(of_stages).any(|of| table_name(of) == name));
        let hint = format!("model.layer_types = [\"{OWN_LAYER}\", \"{name}\"] names it, or leave the table out");
        rules.require(is_used, &path, "is the kind of no layer", hint);
    }
}

/// Checks that `model.layer_types` names kinds that the recipe gives, begins with no shared choice, and has a length
/// that divides the number of layers. Only the first mistake in the names is reported.
pub(super) fn check_layer_types(model: &ModelSection, attention: &AttentionSection, rules: &mut Rules<'_>) {
    let Some(types) = &model.layer_types else {
        return;
    };
    check_types("model.layer_types", types, model, attention, rules);
}

/// Checks `types`, the layers' names in the key `key`, for a model whose section `[attention]` is `attention`.
fn check_types(key: &str, types: &[String], model: &ModelSection, attention: &AttentionSection, rules: &mut Rules<'_>) {
    if let Some((what, hint)) = misnamed(types, attention) {
        return rules.require(false, key, what, hint);
    }
    let (layers, length) = (model.num_hidden_layers, types.len());
    rules.require(
        layers.is_multiple_of(length),
        key,
        format!("has {length} entries, which do not divide num_hidden_layers = {layers}"),
        "the list is repeated over the layers",
    );
}

/// Checks the kinds of the layers of stage `number`: its `kind`, its `layer_types` and its `windows`.
pub(super) fn check_stage_layers(
    number: usize,
    stage: &StageSection,
    attention: &AttentionSection,
    model: Option<&ModelSection>,
    rules: &mut Rules<'_>,
) {
    let key = |name: &str| format!("stage.{number}.{name}");
    for (name, &window) in stage.windows.iter().flatten() {
        let table = attention.others.get(table_name(name));
        let problem = match table.map(|table| (table.window(), table.local_window())) {
            None => Some(format!("names {name:?}, and there is no table [attention.{name}]")),
            Some(_) if window > MAX_SEQ_LEN => Some(format!("has {name} = {window}, above {MAX_SEQ_LEN}")),
            Some((None, _)) => Some(format!("names {name:?}, a kind without a window")),
            Some((_, local)) if local > window => {
                Some(format!("has {name} = {window}, less than local_window_size = {local} of that table"))
            }
            Some(_) => None,
        };
        let hint = "name tables [attention.NAME] with a window; that of [attention] is the stage's window";
        rules.require(problem.is_none(), &key("windows"), problem.unwrap_or_default(), hint);
    }
    if let Some(name) = &stage.kind {
        match attention.layer_named(name) {
            Some(LayerName::Own | LayerName::Other(_)) => {}
            Some(LayerName::Shared) => {
                return rules.require(false, &key("kind"), "is \"shared\", which is not a kind", "name a kind");
            }
            None => {
                let (what, hint) = unknown_layer(name, attention);
                return rules.require(false, &key("kind"), what.replacen("holds", "is", 1), hint);
            }
        }
    }
    let own = attention.of_stage(stage);
    if let Some(why) = own.kind().parted_from(attention.kind()) {
        let what = format!("changes {} to {}: {why}", attention.kind().name(), own.kind().name());
        return rules.require(false, &key("kind"), what, "leave it out");
    }
    let Some(model) = model else { return };
    match (&stage.layer_types, &model.layer_types, &stage.kind) {
        (Some(types), ..) => check_types(&key("layer_types"), types, model, &own, rules),
        (None, Some(types), Some(_)) => {
            let problem = misnamed(types, &own).map(|(what, _)| format!("leaves model.layer_types, which {what}"));
            let hint = "give the stage its own layer_types, or name \"sparse\" in the model's";
            rules.require(problem.is_none(), &key("kind"), problem.unwrap_or_default(), hint);
        }
        _ => {}
    }
}

/// Checks that the length of `model.rope_layers` divides the number of layers.
pub(super) fn check_rope_layers(model: &ModelSection, rules: &mut Rules<'_>) {
    let Some(rotates) = &model.rope_layers else {
        return;
    };
    const KEY: &str = "model.rope_layers";
    if rotates.is_empty() {
        return rules.require(false, KEY, "is an empty list", "leave it out: every layer then has rotary positions");
    }
    let (layers, length) = (model.num_hidden_layers, rotates.len());
    rules.require(
        layers.is_multiple_of(length),
        KEY,
        format!("has {length} entries, which do not divide num_hidden_layers = {layers}"),
        "the list is repeated over the layers",
    );
}

/// Checks that every layer of a model with sinks (`model.attention_sinks`) has a kind that takes them.
pub(super) fn check_sinks(model: &ModelSection, attention: &AttentionSection, rules: &mut Rules<'_>) {
    let without = attention.kinds().find(|attention| !attention.kind().facts().takes_sinks);
    if let Some(without) = without.filter(|_| model.attention_sinks) {
        let with = AttentionKind::takers_of_sinks().map(AttentionKind::name).collect::<Vec<_>>().join(" and ");
        let kind = without.kind().name();
        rules.require(
            false,
            "model.attention_sinks",
            format!("is true, and attention of kind = {kind:?} has no place for a sink"),
            format!(
                "set it to false, with --drop where trained weights have sinks; layers of the kinds {with} take them"
            ),
        );
    }
}

/// What is wrong with the names of layers, and a hint; `None` if nothing.
fn misnamed(types: &[String], attention: &AttentionSection) -> Option<(String, String)> {
    let some = |what: &str, hint: &str| Some((what.to_owned(), hint.to_owned()));
    let kind = attention.kind().name();
    let mut layers = Vec::new();
    for name in types {
        let Some(layer) = attention.layer_named(name) else {
            return Some(unknown_layer(name, attention));
        };
        layers.push(layer);
    }
    if layers.is_empty() {
        return some("is an empty list", "leave it out: every layer then has the kind of [attention]");
    }
    let is_latent = |of: Attention| of.kind().facts().projections == Projections::Latent;
    let others = layers.iter().zip(types).filter_map(|(layer, name)| match layer {
        LayerName::Other(other) => Some((*other, name)),
        LayerName::Own | LayerName::Shared => None,
    });
    let others = others.collect::<Vec<_>>();
    if let Some((_, name)) = others.iter().find(|(other, _)| is_latent(attention.own) || is_latent(*other)) {
        return Some((
            format!("holds {name:?}, but attention.kind = \"{kind}\" shares no model with such layers"),
            "leave it out; mla cannot be combined with other kinds, and all other kinds can be combined".to_owned(),
        ));
    }
    let choice = |layer: &LayerName| match layer {
        LayerName::Own => attention.as_kind().block_choice(),
        LayerName::Other(other) => other.as_kind().block_choice(),
        LayerName::Shared => None,
    };
    if let Some(first) = layers.iter().position(|layer| *layer == LayerName::Shared) {
        if attention.block_choice().is_none() {
            let reason = attention.kind().facts().no_shared_choice;
            return Some((
                format!("holds \"shared\", but layers of attention.kind = \"{kind}\" {reason}"),
                format!(
                    "take kind {}, or name \"sparse\" in its place",
                    names_of_kinds(AttentionKind::choosers_of_blocks())
                ),
            ));
        }
        if layers[..first].iter().find_map(choice).is_none() {
            return some(
                "begins with \"shared\", and no layer before it chooses blocks",
                "[\"sparse\", \"shared\"] makes every second layer read the blocks of the one before",
            );
        }
    }
    if !layers.contains(&LayerName::Own) {
        let all_dense = others.iter().all(|(other, _)| *other == Attention::DENSE);
        return if all_dense {
            some("contains only dense layers", "name \"sparse\" at least once, or set attention.kind to \"mha\"")
        } else {
            some(
                &format!("contains no layer of the kind of [attention], \"{kind}\""),
                "name \"sparse\" at least once, or set attention.kind to a different kind",
            )
        };
    }
    None
}

/// What is wrong with a name that stands for no layer, and a hint.
fn unknown_layer(name: &str, attention: &AttentionSection) -> (String, String) {
    if let Some(kind) = kind_of_layer_type(name) {
        let kind = kind.name();
        return (
            format!("holds {name:?}, and there is no table [attention.{kind}]"),
            format!("add [attention.{kind}] below [attention]; its keys have defaults"),
        );
    }
    let own = [OWN_LAYER, SHARED_LAYER, attention.kind().name(), Attention::DENSE.kind().name()];
    let known = own.into_iter().chain(attention.others.keys().map(String::as_str)).collect::<Vec<_>>();
    let others = if attention.others.is_empty() {
        "\"sparse\", \"mha\" or \"shared\"".to_owned()
    } else {
        format!("\"sparse\", \"mha\", \"shared\" or a table: {}", quoted(&known[own.len()..]))
    };
    (
        format!("holds {name:?}, which names no layer{}", did_you_mean(name, &known)),
        format!("use {others}; [\"sparse\", \"sparse\", \"sparse\", \"mha\"] makes every fourth layer dense"),
    )
}
