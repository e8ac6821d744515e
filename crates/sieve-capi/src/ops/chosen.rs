//! Kinds whose queries choose blocks of keys: the choice, and attention over it.
use super::{Inputs, Outputs, result};
use crate::request::{Blocks, Choice, PlanError};
use serde::{Deserialize, Serialize};
use sieve_core::{BlockChoice, ForcedBlocks};
use sieve_gpu::{CudaTensor, KernelError, Qkv};

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
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self(choice) = self;
        let documents = t.documents()?;
        let by = match t.maybe("index_q") {
            Some(_) => ["index_q", "index_k"],
            None => ["q", "k"],
        };
        let (chosen, [start, end]) = (t.chosen(choice, by, &documents)?, &documents);
        let Blocks(_, _, size, count) = choice.blocks;
        let blocks = match by {
            // An indexer's means are of single tokens; attention reads blocks alone.
            ["index_q", _] => Blocks(size, size, size, count),
            _ => choice.blocks,
        };
        let (qkv, blocks) = (t.qkv()?, blocks.checked()?);
        let (forward, _) = qkv.nsa_selected_attention_forward([start, end], &chosen, blocks, choice.scale)?;
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
        let (q, k) = (self.get(by[0])?, self.get(by[1])?);
        let pooled = Qkv::separate(&k, &k, &k).nsa_mean_pool([start, end], blocks)?;
        let rule = choice.rule.into();
        let by = BlockChoice { blocks, rule, forced };
        let queries = self.queries_of_blocks(&q, &pooled, blocks)?;
        Ok(queries.choose_key_blocks([start, end], &pooled, by, choice.scale)?)
    }
}
