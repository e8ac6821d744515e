//! A run's TensorBoard file: scalars, texts and hyperparameters, as TensorBoard's own plugins read them.
use protobuf::Message;
use protobuf::well_known_types::Value as HyperParameter;
use serde_json::Value;
use sieve_core::Recipe;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use tensorboard_proto::plugin_hparams::{HParamsPluginData, SessionStartInfo};
use tensorboard_proto::summary::{Summary, Summary_Value};
use tensorboard_proto::tensor_shape::TensorShapeProto_Dim;
use tensorboard_proto::types::DataType;
use tensorboard_rs::summary_writer::FileWriter;

/// Sections of a recipe whose keys are shown in TensorBoard's table of hyperparameters.
const HYPERPARAMETERS: [&str; 5] = ["model", "attention", "training", "optimizer", "lr_scheduler"];

/// The writer of the file; `None` if the recipe asks for no file, or after a write failed.
///
/// tensorboard-rs panics when it cannot write. The panic is caught and the file abandoned, so that the run continues.
#[derive(Default)]
pub(crate) struct TensorBoard(Option<FileWriter>);

impl TensorBoard {
    /// Opens a new event file in `folder`.
    pub(crate) fn create(folder: &Path) -> Self {
        Self(catch_unwind(|| FileWriter::new(folder)).ok())
    }

    /// Writes these numbers, each under its tag, for one step; f32 is what the file has.
    pub(crate) fn scalars(&mut self, scalars: &[(&str, f64)], step: u64) {
        let scalars = scalars.iter().map(|&(tag, number)| {
            let mut value = Summary_Value::new();
            value.set_tag(tag.to_owned());
            value.set_simple_value(number as f32);
            value
        });
        self.write(scalars, step);
    }

    /// Writes a Markdown text for TensorBoard's text plugin.
    pub(crate) fn text(&mut self, tag: &str, markdown: &str, step: u64) {
        let mut value = of_plugin("text", tag);
        let mut size = TensorShapeProto_Dim::new();
        size.set_size(1);
        let tensor = value.mut_tensor();
        tensor.set_dtype(DataType::DT_STRING);
        tensor.mut_tensor_shape().mut_dim().push(size);
        tensor.mut_string_val().push(markdown.as_bytes().to_vec());
        self.write([value], step);
    }

    /// Writes the recipe as a text and as hyperparameters.
    pub(crate) fn recipe(&mut self, recipe: &Recipe, toml: &str, step: u64) {
        self.text("recipe", &fenced(toml), step);
        let mut session = SessionStartInfo::new();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        session.set_start_time_secs(now.unwrap_or_default().as_secs_f64());
        let sections = serde_json::to_value(recipe).unwrap_or_default();
        for section in HYPERPARAMETERS {
            for (key, value) in sections[section].as_object().into_iter().flatten() {
                if let Some(value) = hyperparameter(value) {
                    session.mut_hparams().insert(format!("{section}.{key}"), value);
                }
            }
        }
        let mut data = HParamsPluginData::new();
        data.set_session_start_info(session);
        let mut value = of_plugin("hparams", "_hparams_/session_start_info");
        let content = data.write_to_bytes().unwrap_or_default();
        value.mut_metadata().mut_plugin_data().set_content(content);
        self.write([value], step);
    }

    /// Writes `values` as one event of `step`. If the writer panics, the file is given up: `self.0` stays `None`.
    fn write(&mut self, values: impl IntoIterator<Item = Summary_Value>, step: u64) {
        let Some(mut writer) = self.0.take() else {
            return;
        };
        let mut summary = Summary::new();
        values.into_iter().for_each(|value| summary.mut_value().push(value));
        let written = catch_unwind(AssertUnwindSafe(|| {
            writer.add_summary(summary, step as usize);
            writer.flush();
        }));
        match written {
            Ok(()) => self.0 = Some(writer),
            // Not dropped: the writer's destructor would panic too.
            Err(_) => std::mem::forget(writer),
        }
    }
}

impl Drop for TensorBoard {
    fn drop(&mut self) {
        if let Some(writer) = self.0.take() {
            let _ = catch_unwind(AssertUnwindSafe(|| drop(writer)));
        }
    }
}

/// The text as a Markdown code block, indented by four spaces.
pub(crate) fn fenced(text: &str) -> String {
    let lines = text.lines().map(|line| format!("    {line}\n"));
    lines.collect()
}

/// An empty value for a plugin of TensorBoard.
fn of_plugin(plugin: &str, tag: &str) -> Summary_Value {
    let mut value = Summary_Value::new();
    value.set_tag(tag.to_owned());
    let metadata = value.mut_metadata();
    metadata.mut_plugin_data().set_plugin_name(plugin.to_owned());
    value
}

/// A recipe's value for TensorBoard; lists and tables become text. `None` for a key without a value.
fn hyperparameter(value: &Value) -> Option<HyperParameter> {
    let mut parameter = HyperParameter::new();
    match value {
        Value::Null => return None,
        Value::Bool(flag) => parameter.set_bool_value(*flag),
        Value::Number(number) => parameter.set_number_value(number.as_f64()?),
        Value::String(text) => parameter.set_string_value(text.clone()),
        other => parameter.set_string_value(other.to_string()),
    }
    Some(parameter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensorboard_proto::event::Event;

    /// The values of a file: each record is its length, a checksum, an event and a checksum.
    fn values(folder: &Path) -> Vec<(i64, Summary_Value)> {
        let file = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        let mut rest = &bytes[..];
        let mut found = Vec::new();
        while let Some((len, after)) = rest.split_first_chunk::<8>() {
            let len = u64::from_le_bytes(*len) as usize;
            let event: Event = protobuf::Message::parse_from_bytes(&after[4..4 + len]).unwrap();
            let values = event.get_summary().get_value().iter();
            found.extend(values.map(|value| (event.get_step(), value.clone())));
            rest = &after[4 + len + 4..];
        }
        found
    }

    #[test]
    fn scalars_texts_and_hyperparameters_are_read_back() {
        let text = include_str!("../../../recipes/quickstart.toml");
        let recipe = Recipe::load(text, "quickstart", &[]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut board = TensorBoard::create(folder.path());
        board.scalars(&[("lr", 0.5), ("grad_norm", 2.0)], 7);
        board.recipe(&recipe, "[model]\nx = \"<b>\"\n", 0);
        board.text("samples/1", "    once *upon*\n", 9);
        drop(board);
        let found = values(folder.path());
        let tags = found.iter().map(|(step, value)| (*step, value.get_tag()));
        assert_eq!(
            tags.collect::<Vec<_>>(),
            [(7, "lr"), (7, "grad_norm"), (0, "recipe"), (0, "_hparams_/session_start_info"), (9, "samples/1")]
        );
        assert_eq!(found[1].1.get_simple_value(), 2.0);
        let plugin = |at: usize| found[at].1.get_metadata().get_plugin_data();
        assert_eq!((plugin(2).get_plugin_name(), plugin(3).get_plugin_name()), ("text", "hparams"));
        let text = &found[2].1.get_tensor().string_val[0];
        assert_eq!(text, b"    [model]\n    x = \"<b>\"\n");
        let data: HParamsPluginData = protobuf::Message::parse_from_bytes(plugin(3).get_content()).unwrap();
        let parameters = data.get_session_start_info().get_hparams();
        assert_eq!(parameters["optimizer.lr"].get_number_value(), recipe.optimizer.lr);
        assert_eq!(parameters["attention.kind"].get_string_value(), "dma");
        assert!(parameters["model.tie_word_embeddings"].get_bool_value());
        assert!(!parameters.contains_key("checkpoint.interval") && parameters.len() > 20);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "no folder").unwrap();
        let mut board = TensorBoard::create(&file);
        assert!(board.0.is_none());
        board.scalars(&[("lr", 0.5)], 1);
    }
}
