//! One parameter of a model: its name in a checkpoint and in `transformers`, its sizes, and how it is trained.

/// The part of a model that a parameter is counted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The embedding.
    Embedding,
    /// The output projection, if it is not tied to the embedding.
    Output,
    /// Projections of queries, keys, values and attention output, with their biases.
    Attention,
    /// DMA's A and W_dt.
    Mask,
    /// NSA's gates, and its compression of keys and values.
    Branches,
    /// The projection of an indexer's queries and key, and its norms.
    Indexer,
    /// Gate, up and down projections.
    Mlp,
    /// Weights of RMSNorm.
    Norms,
    /// Learned scales of the residual stream.
    ResidualScale,
}

/// What the rows of a parameter are, which decides how it is updated and stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rows {
    /// Output channels of a GEMM's weight, which may be stored in bf16 on a CPU.
    Gemm,
    /// Output channels of a weight that stays in f32: it makes scores, or is multiplied into other weights.
    F32Gemm,
    /// Independent vectors or numbers: embeddings of positions, norms, biases, scales.
    Vectors,
}

/// A parameter tensor of a model or a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Name in a checkpoint: the path of the module's fields. Within a layer without `layers.N.`.
    pub ours: String,
    /// Names in `transformers`, each with its number of rows, in the order of the tensor's rows. Within a layer without
    /// `model.layers.N.`. More than one where the projections are packed here and apart there.
    pub theirs: Vec<(String, usize)>,
    /// Sizes of the tensor; rows first.
    pub dims: Vec<usize>,
    /// What it is counted with.
    pub part: Part,
    /// What its rows are.
    pub rows: Rows,
}

impl ParamSpec {
    /// The weight `[out, in]` of a GEMM.
    pub fn gemm(ours: &str, theirs: &str, dims: [usize; 2], part: Part) -> Self {
        let theirs = vec![(theirs.to_owned(), dims[0])];
        Self { ours: ours.to_owned(), theirs, dims: dims.to_vec(), part, rows: Rows::Gemm }
    }

    /// The weight of projections that are packed into one here: `theirs` has the name and the rows of each in
    /// `transformers`.
    pub fn packed(ours: &str, theirs: &[(&str, usize)], columns: usize, part: Part) -> Self {
        let rows = theirs.iter().map(|(_, rows)| rows).sum();
        let theirs = theirs.iter().map(|(name, rows)| ((*name).to_owned(), *rows)).collect();
        Self { ours: ours.to_owned(), theirs, dims: vec![rows, columns], part, rows: Rows::Gemm }
    }

    /// A tensor of independent vectors or numbers.
    pub fn vectors(ours: &str, theirs: &str, dims: &[usize], part: Part) -> Self {
        let theirs = vec![(theirs.to_owned(), dims[0])];
        Self { ours: ours.to_owned(), theirs, dims: dims.to_vec(), part, rows: Rows::Vectors }
    }

    /// The same weight, which always stays in f32.
    pub fn in_f32(self) -> Self {
        Self { rows: Rows::F32Gemm, ..self }
    }

    /// The same parameter of layer `layer_idx`, with its full names.
    pub fn in_layer(mut self, layer_idx: usize) -> Self {
        self.ours = format!("layers.{layer_idx}.{}", self.ours);
        for (name, _) in &mut self.theirs {
            *name = format!("model.layers.{layer_idx}.{name}");
        }
        self
    }

    /// For optimizers that orthogonalise matrices (Muon): the rows of each projection that is packed in this one.
    /// `None` for embeddings, for independent vectors, and for matrices with a side below 32, which are gates and
    /// scores of a few heads.
    pub fn orthogonal_rows(&self) -> Option<Vec<usize>> {
        let is_in_layer = !matches!(self.part, Part::Embedding | Part::Output);
        let is_matrix = self.rows != Rows::Vectors && self.dims.len() == 2 && self.dims.iter().all(|&side| side >= 32);
        (is_in_layer && is_matrix).then(|| self.theirs.iter().map(|(_, rows)| *rows).collect())
    }

    /// Number of elements.
    pub fn num_elements(&self) -> u64 {
        self.dims.iter().map(|&size| size as u64).product()
    }
}
