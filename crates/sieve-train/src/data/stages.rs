//! Text that a stage names for itself.
use super::{DataEvent, StageText, TextSource, TrainingData};
use crate::TrainError;
use crate::origin::saved_recipe;
use sieve_core::Recipe;
use sieve_core::recipe::Stage;
use sieve_data::{OnChange, Prepared, SplitMeta, Surroundings};
use sieve_hf::Checkpoint;
use std::path::Path;

/// Separates the fingerprint of the run's text from the fingerprints of the stages' texts: `RUN+1:STAGE1+2:STAGE2`.
const PART: char = '+';

/// The stages that name text of their own.
fn with_paths(recipe: &Recipe) -> impl Iterator<Item = Stage> {
    let stages = recipe.stages().into_iter();
    stages.filter(|stage| stage.section.paths.is_some())
}

/// Lists the text of every stage, so that a path without files is refused before anything is written.
pub(super) fn check_stages(recipe: &Recipe, around: &Surroundings<'_>) -> Result<(), TrainError> {
    for stage in with_paths(recipe) {
        TextSource::open(&recipe.at_stage(&stage), around)?;
    }
    Ok(())
}

impl TrainingData {
    /// Prepares, or reopens, the text of the stages that name their own, in `dir/stage-N`, with this data's tokenizer.
    ///
    /// `resumed` is the checkpoint of a run that is resumed. A stage with the paths and weights of the checkpoint's
    /// recipe must find the same tokens again; a stage with other paths is prepared as in a new run.
    ///
    /// # Errors
    /// The errors of [`DataSource::prepare`](super::DataSource::prepare); text that has changed under the same paths.
    pub fn prepare_stages(
        &mut self,
        recipe: &Recipe,
        (dir, on_change): (&Path, OnChange),
        resumed: Option<&Checkpoint>,
        around: &Surroundings<'_>,
        observe: &mut dyn FnMut(DataEvent),
    ) -> Result<(), TrainError> {
        let before = match resumed {
            Some(checkpoint) => saved_recipe(checkpoint)?.stages(),
            None => Vec::new(),
        };
        for stage in with_paths(recipe) {
            let alone = recipe.at_stage(&stage);
            let dir = dir.join(format!("stage-{}", stage.index + 1));
            let text = |stage: &Stage| (stage.section.paths.clone(), stage.section.weights.clone());
            let is_same = before.get(stage.index).is_some_and(|before| text(before) == text(&stage));
            let saved = resumed.filter(|_| is_same).and_then(|resumed| {
                let [fingerprint, tokens] = [&resumed.state.data_fingerprint, &resumed.state.data_tokens];
                Some([part(fingerprint, stage.index)?, part(tokens, stage.index).unwrap_or_default()])
            });
            let on_change = saved.map_or(on_change, |_| OnChange::Refuse);
            // The text files may have disappeared since; the shards that were made from them decide.
            let found = saved.and_then(|saved| {
                let mut prepared = Prepared::open(&dir).ok()?;
                super::is_known(&mut prepared, saved).then_some(prepared)
            });
            let mut prepared = match found {
                Some(prepared) => prepared,
                None => self.prepare_stage(&alone, (&dir, on_change), around, observe)?,
            };
            if saved.is_some_and(|saved| !super::is_known(&mut prepared, saved)) {
                return Err(TrainError::other_data(&dir, "the text files have changed since"));
            }
            let weights = alone.data.weights;
            self.stages.insert(stage.index, StageText { prepared, weights });
        }
        Ok(())
    }

    /// Prepares the text of one stage in `dir`; `alone` is the recipe with the stage's settings.
    fn prepare_stage(
        &self,
        alone: &Recipe,
        (dir, on_change): (&Path, OnChange),
        around: &Surroundings<'_>,
        observe: &mut dyn FnMut(DataEvent),
    ) -> Result<Prepared, TrainError> {
        let no_checkpoint = None;
        let mut text = TextSource::open(alone, around)?.with_chats(alone, no_checkpoint, around)?;
        text.connect(dir)?;
        // A stage's text lies in a folder of the same name there.
        let name = dir.file_name().unwrap_or_default();
        let known = self.known.iter().map(|other| other.join(name)).collect::<Vec<_>>();
        text.prepare(alone, &self.tokenizer, (dir, &known, on_change), self.prepared(), observe)
    }

    /// Whether a file of the recipe was changed, removed or added since the shards were made. Data sets of the hub are
    /// not checked.
    pub fn text_has_changed(&self, recipe: &Recipe, around: &Surroundings<'_>) -> bool {
        let is_made_of = |prepared: &Prepared, recipe: &Recipe| {
            let text = TextSource::open(recipe, around)?;
            Ok::<_, TrainError>(prepared.meta.is_made_of(&text.train, text.validation.as_ref()))
        };
        let own = self.prepared().map(|prepared| (prepared, recipe.clone()));
        let all = recipe.stages();
        let stages = self.stages.iter();
        let stages = stages.map(|(index, text)| (&text.prepared, recipe.at_stage(&all[*index])));
        // `is_made_of` returns an error if a file has disappeared.
        let mut parts = own.into_iter().chain(stages);
        parts.any(|(prepared, recipe)| !is_made_of(prepared, &recipe).unwrap_or(false))
    }

    /// Fingerprint of the data: the run's own, then each stage's.
    pub fn fingerprint(&self) -> String {
        self.parts(self.base_fingerprint(), |prepared| prepared.meta.fingerprint.clone())
    }

    /// Hashes of the tokens in the shards, in the form of [`fingerprint`](Self::fingerprint).
    pub(crate) fn tokens(&self) -> String {
        self.parts(self.prepared().map(tokens_of).unwrap_or_default(), tokens_of)
    }

    /// Joins the hash `run` and `of(shards)` of each stage that has text of its own.
    fn parts(&self, run: String, of: impl Fn(&Prepared) -> String) -> String {
        let stages = self.stages.iter();
        let stages = stages.map(|(index, text)| format!("{PART}{index}:{}", of(&text.prepared)));
        std::iter::once(run).chain(stages).collect()
    }
}

/// Hashes of the training tokens and of the held-out tokens, each with a hash of which tokens are predicted, unless all
/// are.
pub(super) fn tokens_of(prepared: &Prepared) -> String {
    let meta = &prepared.meta;
    let of_split = |split: &SplitMeta| match &split.bounds_hash {
        None => split.tokens_hash.clone(),
        Some(bounds) => format!("{}-{bounds}", split.tokens_hash),
    };
    format!("{}-{}", of_split(&meta.train), of_split(&meta.validation))
}

/// The fingerprint of the text that a stage names for itself; `None` if it names none.
fn part(fingerprint: &str, stage_index: usize) -> Option<&str> {
    let mut parts = fingerprint.split(PART).skip(1);
    parts.find_map(|part| {
        let (index, fingerprint) = part.split_once(':')?;
        (index.parse() == Ok(stage_index)).then_some(fingerprint)
    })
}

/// The fingerprint of the run's text, without the stages'.
pub(super) fn base(fingerprint: &str) -> &str {
    fingerprint.split(PART).next().unwrap_or_default()
}

/// The fingerprint of the text that stage `stage_index` reads: its own, else the run's.
pub(crate) fn of_stage(fingerprint: &str, stage_index: usize) -> &str {
    part(fingerprint, stage_index).unwrap_or_else(|| base(fingerprint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_has_a_part_for_each_stage_with_text() {
        let all = "abc+1:def+12:ghi";
        assert_eq!(base(all), "abc");
        let found = [0, 1, 2, 12].map(|index| of_stage(all, index));
        assert_eq!(found, ["abc", "def", "abc", "ghi"]);
        assert_eq!(of_stage("abc", 1), "abc");
    }
}
