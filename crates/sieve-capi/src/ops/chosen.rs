//! Kinds whose queries choose blocks of keys: the choice, and attention over it.
use super::{Inputs, Outputs, result};
use crate::request::{Choice, PlanError};
use serde::{Deserialize, Serialize};
use sieve_core::{BlockChoice, ForcedBlocks};
use sieve_gpu::{AttendedBlocks, CudaTensor, Heads, KernelError, nsa_mean_pool};

/// q, k, doc_start, doc_end → block_indices
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(transparent)]
pub struct ChooseBlocks(pub Choice);

impl ChooseBlocks {
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self(choice) = self;
        let chosen = t.chosen(choice, ["q", "k"], &t.documents()?)?;
        Ok(vec![("block_indices", chosen)])
    }
}

/// Choice, of each KV head, and attention: q, k, v, index_q?, index_k?, doc_start, doc_end → o, and unless
/// `only_o` lse, block_indices. Blocks are chosen by index_q and index_k, else by q and k
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(transparent)]
pub struct ChosenForward(pub Choice);

impl ChosenForward {
    /// Chooses by means of the keys, which are pooled here; `first` and `local` blocks are always among the chosen.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self(choice) = self;
        let documents = t.documents()?;
        let by = match t.maybe("index_q") {
            Some(_) => ["index_q", "index_k"],
            None => ["q", "k"],
        };
        let (chosen, [start, end]) = (t.chosen(choice, by, &documents)?, &documents);
        let blocks = AttendedBlocks::single(&chosen, choice.blocks.checked()?.select_block_size);
        let (forward, _) = t.qkv()?.nsa_selected_attention_forward([start, end], blocks, choice.scale)?;
        let mut outputs = result(forward, choice.only_o);
        outputs.extend((!choice.only_o).then_some(("block_indices", chosen)));
        Ok(outputs)
    }
}

impl Inputs {
    /// The blocks that each query chooses by its scores with mean keys; `by` names the tensors of queries and of keys.
    fn chosen(&self, choice: &Choice, by: [&str; 2], [start, end]: &[CudaTensor; 2]) -> Result<CudaTensor, PlanError> {
        let &Choice { first, local, .. } = choice;
        let (blocks, forced) = (choice.blocks.checked()?, ForcedBlocks { first, local });
        if forced.local == 0 || forced.count() > blocks.num_selected_blocks {
            let got = format!("{} local ones of {} chosen", forced.local, blocks.num_selected_blocks);
            let supported = "1 or more, and no more than chosen";
            return Err(KernelError::unsupported(self.op, "blocks", got, supported).into());
        }
        let [q, k] = [Heads::all(&self.get(by[0])?), Heads::all(&self.get(by[1])?)];
        // The kernel pools two tensors, keys and values; the choice reads the means of the first, the keys.
        let pooled = nsa_mean_pool([&k, &k], [start, end], blocks)?;
        let choice_of_blocks = BlockChoice { blocks, rule: choice.rule.into(), forced };
        Ok(q.choose_key_blocks([start, end], &pooled, choice_of_blocks, choice.scale)?)
    }
}
