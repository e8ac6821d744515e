//! The files of weights in a folder of `transformers`, and which file each tensor is read from.
use crate::odd_folders::{refuse_odd_file, weights_of_other_names};
use crate::tensor_file::Stored;
use crate::tensor_files::{INDEX, SINGLE};
use crate::{CheckpointError, TensorFile};
use serde_json::Value;
use sieve_core::ShownPath;
use sieve_files::read_text;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// Weights in pickles, which are programs and are not read.
const PICKLES: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// The files, and the tensors in them.
pub(super) struct Weights {
    pub(super) folder: PathBuf,
    files: Vec<TensorFile>,
    /// Index of the file that each tensor is read from.
    file_of: BTreeMap<String, usize>,
    /// Tensors of which two files hold different copies, with the reason why neither is read.
    pub(super) conflicts: BTreeSet<String>,
    /// What else the folder holds that is not read.
    pub(super) notes: Vec<String>,
}

impl Weights {
    /// Opens the files that `transformers` reads: the single file if there is one, otherwise the shards of the index.
    ///
    /// # Errors
    /// No file of weights, an index that cannot be read, or a missing or unreadable file.
    pub(super) fn open(from: &Path) -> Result<Self, CheckpointError> {
        let (index, single) = (from.join(INDEX), from.join(SINGLE));
        for path in [&single, &index] {
            refuse_odd_file(path)?;
        }
        let mut notes = Vec::new();
        let (names, owners) = match (single.is_file(), index.is_file()) {
            (true, has_index) => {
                if has_index {
                    notes.push(format!(
                        "the folder has both {SINGLE} and {INDEX}: {SINGLE} is read, as transformers does, and the \
                         files of the index are not"
                    ));
                }
                (BTreeSet::from([SINGLE.to_owned()]), BTreeMap::new())
            }
            (false, true) => {
                let owners = read_index(&index)?;
                (owners.values().cloned().collect(), owners)
            }
            (false, false) => {
                let has_pickles = PICKLES.iter().any(|name| from.join(name).is_file());
                let others = weights_of_other_names(from);
                let hint = match (has_pickles, others.is_empty()) {
                    (true, _) => sieve_core::how_to_convert(&from.shown().to_string()),
                    (false, false) => format!(
                        "fetch the model again: {SINGLE}, or {INDEX} and the files that it names; other files are not \
                         read"
                    ),
                    (false, true) => "name a folder with weights as safetensors".to_owned(),
                };
                let has = if others.is_empty() { String::new() } else { format!(", but {}", others.join(", ")) };
                let problem = format!("it has neither {SINGLE} nor {INDEX}{has}");
                return Err(CheckpointError::not_importable(from, problem, hint));
            }
        };
        let lost = names.iter().filter(|name| !from.join(name).is_file()).cloned().collect::<Vec<_>>();
        if !lost.is_empty() {
            return Err(CheckpointError::not_importable(
                from,
                format!("of {} files that {INDEX} names {} are missing: {}", names.len(), lost.len(), lost.join(", ")),
                "fetch or copy them into the folder: a transfer may have been broken off",
            ));
        }
        let files = names.iter().map(|name| TensorFile::open(&from.join(name))).collect::<Result<Vec<_>, _>>()?;
        let (folder, file_of, conflicts) = (from.to_owned(), BTreeMap::new(), BTreeSet::new());
        let mut weights = Self { folder, files, file_of, conflicts, notes };
        weights.locate(&names.into_iter().collect::<Vec<_>>(), &owners)?;
        Ok(weights)
    }

    /// Finds the file of each tensor. Of several copies, `transformers` reads the one in the last file by name, and the
    /// index may name another: then the copies must be equal.
    fn locate(&mut self, names: &[String], owners: &BTreeMap<String, String>) -> Result<(), CheckpointError> {
        let mut copies = BTreeMap::<String, Vec<usize>>::new();
        for (number, file) in self.files.iter().enumerate() {
            for name in file.names() {
                copies.entry(name).or_default().push(number);
            }
        }
        for (name, copies) in copies {
            let last = copies[copies.len() - 1];
            self.file_of.insert(name.clone(), last);
            if copies.len() == 1 {
                continue;
            }
            let owner = owners.get(&name);
            let read = &names[last];
            if owner == Some(read) || self.are_equal(&name, &copies)? {
                self.notes.push(format!("{name} is in {} files: the copy in {read} is read", copies.len()));
                continue;
            }
            let files = copies.iter().map(|&number| names[number].as_str()).collect::<Vec<_>>().join(" and ");
            let index = owner.map_or("no file".to_owned(), Clone::clone);
            self.conflicts.insert(format!(
                "{name} (it differs in {files}; {INDEX} names {index}, and transformers reads {read})"
            ));
        }
        Ok(())
    }

    fn are_equal(&self, name: &str, copies: &[usize]) -> Result<bool, CheckpointError> {
        let stored = copies.iter().map(|&number| self.files[number].stored(name));
        let stored = stored.collect::<Result<Vec<_>, _>>()?;
        Ok(stored.windows(2).all(|pair| is_same(&pair[0], &pair[1])))
    }

    /// Names of all tensors, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.file_of.keys().map(String::as_str)
    }

    /// A tensor; `None` if no file has it.
    pub(super) fn find(&self, name: &str) -> Result<Option<Stored<'_>>, CheckpointError> {
        self.file_of.get(name).map(|&number| self.files[number].stored(name)).transpose()
    }
}

/// Whether two tensors have the same type, shape and bytes.
pub(super) fn is_same(a: &Stored<'_>, b: &Stored<'_>) -> bool {
    (a.dtype, &a.shape, a.bytes) == (b.dtype, &b.shape, b.bytes)
}

/// The file that an index names for each tensor. All files must be in the folder of the index, or in folders below it.
fn read_index(index: &Path) -> Result<BTreeMap<String, String>, CheckpointError> {
    let text = read_text(index).map_err(CheckpointError::io("reading", index))?;
    let malformed = |problem: String| CheckpointError::malformed(index, problem);
    let value: Value = serde_json::from_str(&text).map_err(|error| CheckpointError::not_json(index, &text, &error))?;
    let map = value["weight_map"].as_object();
    let map =
        map.filter(|map| !map.is_empty()).ok_or_else(|| malformed("its weight_map names no tensor".to_owned()))?;
    let owners = map.iter().map(|(tensor, file)| {
        let is_below = |file: &&str| {
            !file.is_empty()
                && Path::new(file).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
        };
        let inside = file.as_str().filter(is_below).ok_or_else(|| {
            let what = format!("{}: {tensor} is in no file of its folder or below it: {file}", index.shown());
            CheckpointError::refused(what, "copy the files of weights into the folder, and name them in the index so")
        })?;
        Ok((tensor.clone(), inside.to_owned()))
    });
    owners.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NamedTensor, write_tensor_file};
    use burn::tensor::TensorData;
    use serde_json::json;
    use std::fs;

    const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

    fn write(folder: &Path, file: &str, tensors: &[(&str, f32)]) {
        let tensors = tensors
            .iter()
            .map(|(name, value)| NamedTensor { name: (*name).to_owned(), data: TensorData::new(vec![*value], [1]) });
        write_tensor_file(&folder.join(file), &tensors.collect::<Vec<_>>(), None).expect("writable");
    }

    /// Writes an index: the number of the shard that it names for each tensor.
    fn write_index(folder: &Path, owners: &[(&str, usize)]) {
        let map = owners.iter().map(|(name, shard)| ((*name).to_owned(), SHARDS[*shard].into()));
        let map: serde_json::Map<String, Value> = map.collect();
        fs::write(folder.join(INDEX), json!({ "metadata": {}, "weight_map": map }).to_string()).expect("writable");
    }

    /// The value of a tensor of one element.
    fn value(weights: &Weights, name: &str) -> f32 {
        let stored = weights.find(name).expect("readable").expect(name);
        f32::from_le_bytes(stored.bytes.try_into().expect("one number"))
    }

    #[test]
    fn the_single_file_comes_before_shards_of_another_model() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path();
        write(folder, SHARDS[0], &[("a", 1.0), ("old", 3.0)]);
        write_index(folder, &[("a", 0), ("old", 0)]);
        let read = || Weights::open(folder).expect("it has weights");
        assert_eq!((value(&read(), "a"), read().notes.len()), (1.0, 0));
        write(folder, SINGLE, &[("a", 2.0)]);
        let weights = read();
        assert_eq!((value(&weights, "a"), weights.names().collect::<Vec<_>>()), (2.0, vec!["a"]));
        sieve_testing::says(&weights.notes.join("\n"), "both model.safetensors and model.safetensors.index.json");
        // A shard that is missing does not matter then.
        fs::remove_file(folder.join(SHARDS[0])).expect("there");
        assert_eq!(value(&read(), "a"), 2.0);
        fs::remove_file(folder.join(SINGLE)).expect("there");
        sieve_testing::refusal(Weights::open(folder), SHARDS[0]);
    }

    #[test]
    fn shards_in_folders_below_the_index_are_read_and_others_are_not() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("model");
        fs::create_dir_all(folder.join("parts/b")).expect("new");
        let index = |files: [&str; 2]| {
            let map = json!({"metadata": {}, "weight_map": {"a": files[0], "b": files[1]}});
            fs::write(folder.join(INDEX), map.to_string()).expect("writable");
        };
        write(&folder, "parts/one.safetensors", &[("a", 1.0)]);
        write(&folder, "parts/b/two.safetensors", &[("b", 2.0)]);
        write(dir.path(), "outside.safetensors", &[("b", 3.0)]);
        for two in ["parts/b/two.safetensors", "./parts/b/two.safetensors"] {
            index(["parts/one.safetensors", two]);
            let weights = Weights::open(&folder).expect("it has weights");
            assert_eq!((value(&weights, "a"), value(&weights, "b")), (1.0, 2.0));
        }
        let absolute = dir.path().join("outside.safetensors").to_string_lossy().into_owned();
        for outside in ["../outside.safetensors", "parts/../../outside.safetensors", absolute.as_str(), "", "/"] {
            index(["parts/one.safetensors", outside]);
            sieve_testing::refusal(Weights::open(&folder), "b is in no file of its folder or below it | copy");
        }
    }

    #[test]
    fn of_two_copies_the_one_that_index_and_transformers_agree_on_is_read() {
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path();
        // The values of `a` in the two shards, the shard that the index names, and the value that is read.
        for (values, owner, wanted) in
            [([1.0, 1.0], 0, Some(1.0)), ([1.0, 2.0], 1, Some(2.0)), ([1.0, 2.0], 0, None), ([1.0, 1.0], 1, Some(1.0))]
        {
            write(folder, SHARDS[0], &[("a", values[0]), ("c", 7.0)]);
            write(folder, SHARDS[1], &[("a", values[1]), ("b", 5.0)]);
            write_index(folder, &[("a", owner), ("b", 1), ("c", 0)]);
            let weights = Weights::open(folder).expect("it has weights");
            let found = weights.conflicts.is_empty().then(|| value(&weights, "a"));
            assert_eq!(found, wanted, "{values:?} {owner}");
            assert_eq!(weights.notes.len(), usize::from(wanted.is_some()), "{:?}", weights.notes);
            for conflict in &weights.conflicts {
                sieve_testing::says(conflict, &format!("a (it differs in {} and {};", SHARDS[0], SHARDS[1]));
            }
        }
    }
}
