//! Runs the statements of a template.

use super::fault::{Budget, Fallible, Fault};
use super::python;
use super::syntax::{Body, Expr, FilterCall, For, Macro, Node, NodeKind, Target};
use super::value::{BoundMacro, Items, LoopState, Mark, Namespace, ScopeId, Text, Value};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Expressions, blocks and macros within each other while a template runs. The stack of
/// [`on_own_stack`](super::on_own_stack) is made for as many.
const MOST_LEVELS: u32 = 2000;

/// Variables of a block.
#[derive(Debug)]
struct Scope {
    number: u64,
    parent: Option<usize>,
    values: HashMap<String, Value>,
}

/// How a statement ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// The state of one rendering: what names mean, the text so far, and what is left of the budget.
pub(super) struct Renderer<'a> {
    pub(super) budget: &'a Budget,
    scopes: Vec<Scope>,
    /// Place of the scope that names are looked up in first.
    current: usize,
    num_scopes: u64,
    /// The text so far, and behind it those of the blocks that are written into a value.
    outputs: Vec<Text>,
    /// All namespaces, to empty them at the end: one may hold itself.
    namespaces: Vec<Namespace>,
    /// The item that each loop around this place is at.
    loop_items: Vec<Value>,
    levels: u32,
    /// Number of `{% generation %}` blocks so far.
    num_marks: u32,
}

/// Arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub(super) args: Vec<Value>,
    pub(super) named: Vec<(String, Value)>,
}

impl<'a> Renderer<'a> {
    /// A rendering in whose outermost scope `variables` are set; all that it does is taken from `budget`.
    pub(super) fn new(variables: Vec<(String, Value)>, budget: &'a Budget) -> Self {
        let scope = Scope { number: 0, parent: None, values: variables.into_iter().collect() };
        Self {
            budget,
            scopes: vec![scope],
            current: 0,
            num_scopes: 1,
            outputs: Vec::new(),
            namespaces: Vec::new(),
            loop_items: Vec::new(),
            levels: 0,
            num_marks: 0,
        }
    }

    /// The text of a template, and what its `{% generation %}` blocks wrote, which `needs_marks` asks for.
    ///
    /// # Errors
    /// A template that fails; with `needs_marks`, a block whose text was changed after it was written.
    pub(super) fn render(mut self, body: &Body, needs_marks: bool) -> Fallible<Text> {
        self.outputs.push(Text::default());
        let end = self.body(body);
        for namespace in &self.namespaces {
            namespace.borrow_mut().clear();
        }
        end?;
        let text = self.outputs.pop().unwrap_or_default();
        let mut numbers = text.marks.iter().map(|mark| mark.number).collect::<Vec<_>>();
        numbers.sort_unstable();
        numbers.dedup();
        if needs_marks && numbers.len() != self.num_marks as usize {
            return Err(Fault::refused(
                "the text of a {% generation %} block is changed after the block, so its place is unknown: write \
                 it where it is printed, without a filter",
            ));
        }
        Ok(text)
    }

    /// Calls `inside` one level deeper.
    ///
    /// # Errors
    /// More than [`MOST_LEVELS`].
    pub(super) fn deeper<T>(&mut self, inside: impl FnOnce(&mut Self) -> Fallible<T>) -> Fallible<T> {
        self.levels += 1;
        if self.levels > MOST_LEVELS {
            return Err(Fault::limit("its macros and blocks are called within each other too often"));
        }
        let found = inside(self);
        self.levels -= 1;
        found
    }

    /// Calls `inside` in a scope of its own, which ends with it.
    fn scoped<T>(&mut self, parent: usize, inside: impl FnOnce(&mut Self) -> Fallible<T>) -> Fallible<T> {
        self.budget.steps(1)?;
        let number = self.num_scopes;
        self.num_scopes += 1;
        self.scopes.push(Scope { number, parent: Some(parent), values: HashMap::new() });
        let before = std::mem::replace(&mut self.current, self.scopes.len() - 1);
        let found = inside(self);
        self.scopes.pop();
        self.current = before;
        found
    }

    /// The text that `inside` writes.
    fn captured(&mut self, inside: impl FnOnce(&mut Self) -> Fallible<()>) -> Fallible<Text> {
        self.outputs.push(Text::default());
        let end = inside(self);
        let text = self.outputs.pop().unwrap_or_default();
        end.map(|()| text)
    }

    fn scope_id(&self) -> ScopeId {
        ScopeId { place: self.current, number: self.scopes[self.current].number }
    }

    /// The place of a scope that has not ended.
    fn scope_of(&self, id: ScopeId) -> Fallible<usize> {
        match self.scopes.get(id.place) {
            Some(scope) if scope.number == id.number => Ok(id.place),
            _ => Err(Fault::refused("a macro is called after the block that it was made in")),
        }
    }

    /// What a name means in this scope or the nearest one around it; `None` where none has it.
    pub(super) fn variable(&self, name: &str) -> Fallible<Option<Value>> {
        let mut place = Some(self.current);
        while let Some(found) = place {
            self.budget.steps(1)?;
            let scope = &self.scopes[found];
            if let Some(value) = scope.values.get(name) {
                return Ok(Some(value.clone()));
            }
            place = scope.parent;
        }
        Ok(None)
    }

    fn set(&mut self, name: &str, value: Value) {
        self.scopes[self.current].values.insert(name.to_owned(), value);
    }

    /// A new namespace.
    pub(super) fn namespace(&mut self, values: Vec<(String, Value)>) -> Fallible<Value> {
        self.budget.list(1 + values.len())?;
        let made = Rc::new(RefCell::new(Vec::with_capacity(values.len())));
        self.namespaces.push(made.clone());
        for (name, value) in values {
            set_attribute(&made, &name, value)?;
        }
        Ok(Value::Namespace(made))
    }

    fn write(&mut self, text: &str, marks: &[Mark]) -> Fallible<()> {
        self.budget.text(text.len())?;
        if let Some(out) = self.outputs.last_mut() {
            append(out, text, marks);
        }
        Ok(())
    }

    /// Runs statements in their order until one of them breaks or continues a loop, and returns that.
    fn body(&mut self, body: &Body) -> Fallible<Flow> {
        self.deeper(|renderer| {
            for node in body {
                renderer.budget.steps(1)?;
                match renderer.node(node).map_err(|fault| fault.at(node.line))? {
                    Flow::Next => {}
                    flow => return Ok(flow),
                }
            }
            Ok(Flow::Next)
        })
    }

    /// Runs a statement; a `break` or `continue` in it is returned, for the loop around it.
    fn node(&mut self, node: &Node) -> Fallible<Flow> {
        match &node.kind {
            NodeKind::Data(text) => self.write(text, &[])?,
            NodeKind::Print(value) => self.print(value)?,
            NodeKind::For(code) => return self.loop_over(code),
            NodeKind::If(branches, otherwise) => return self.branch(branches, otherwise),
            NodeKind::Set(target, value) => {
                let value = self.value(value)?;
                self.assign(target, value)?;
            }
            NodeKind::SetBlock(target, filters, body) => {
                let text = self.captured_in_scope(body)?;
                let value = self.filtered(Value::Text(Rc::new(text)), filters)?;
                self.assign(target, value)?;
            }
            NodeKind::With(values, body) => {
                let values = values.iter().map(|(target, value)| Ok((target, self.value(value)?)));
                let values = values.collect::<Fallible<Vec<_>>>()?;
                return self.scoped(self.current, |renderer| {
                    values.into_iter().try_for_each(|(target, value)| renderer.assign(target, value))?;
                    renderer.body(body)
                });
            }
            NodeKind::Macro(code) => {
                let found = self.bound(code);
                self.set(&code.name, found);
            }
            NodeKind::Call(call, caller) => {
                let caller = self.bound(caller);
                let value = self.call_with(call, Some(caller))?;
                self.print_value(&value)?;
            }
            NodeKind::Filter(filters, body) => {
                let text = self.captured_in_scope(body)?;
                let value = self.filtered(Value::Text(Rc::new(text)), filters)?;
                self.print_value(&value)?;
            }
            NodeKind::Generation(body) => self.generation(body)?,
            NodeKind::Block(body) => return self.scoped(0, |renderer| renderer.body(body)),
            NodeKind::Break => return Ok(Flow::Break),
            NodeKind::Continue => return Ok(Flow::Continue),
            NodeKind::Refused(what) => return Err(Fault::refused(*what)),
        }
        Ok(Flow::Next)
    }

    /// Runs the body of the first condition that is true, else `otherwise`; names that it sets stay set, as it is no
    /// scope.
    fn branch(&mut self, branches: &[(Expr, Body)], otherwise: &Body) -> Fallible<Flow> {
        for (condition, body) in branches {
            if self.value(condition)?.is_true() {
                return self.body(body);
            }
        }
        self.body(otherwise)
    }

    fn captured_in_scope(&mut self, body: &Body) -> Fallible<Text> {
        self.captured(|renderer| renderer.scoped(renderer.current, |renderer| renderer.body(body).map(|_| ())))
    }

    /// What the assistant writes: a block inside this one is part of it.
    fn generation(&mut self, body: &Body) -> Fallible<()> {
        let number = self.num_marks;
        let found = self.captured_in_scope(body)?;
        self.num_marks = number + 1;
        let message = self.loop_items.iter().rev().find_map(|item| match item {
            Value::Dict(dict) => dict.message,
            _ => None,
        });
        let mark = Mark { number, bytes: 0..found.text.len(), message };
        self.write(&found.text, &[mark])
    }

    fn print(&mut self, value: &Expr) -> Fallible<()> {
        let value = self.value(value)?;
        self.print_value(&value)
    }

    /// Writes a value's text with its marks; an undefined value has none.
    fn print_value(&mut self, value: &Value) -> Fallible<()> {
        match value {
            Value::Text(text) => self.write(&text.text, &text.marks),
            Value::Undefined(_) => Ok(()),
            other => {
                let text = python::repr(other, self.budget)?;
                self.write(&text, &[])
            }
        }
    }

    fn filtered(&mut self, mut value: Value, filters: &[FilterCall]) -> Fallible<Value> {
        for filter in filters {
            let given = self.given(&filter.arguments)?;
            value = self.filter(&filter.name, value, given).map_err(|fault| fault.at(filter.line))?;
        }
        Ok(value)
    }

    /// Gives a value to a name, an attribute of a namespace, or its items to several.
    fn assign(&mut self, target: &Target, value: Value) -> Fallible<()> {
        match target {
            Target::Name(name) => self.set(name, value),
            Target::Attribute(name, attribute) => match self.variable(name)? {
                Some(Value::Namespace(namespace)) => {
                    self.budget.list(1)?;
                    set_attribute(&namespace, attribute, value)?;
                }
                _ => return Err(Fault::refused(format!("{name} is not a namespace, so it has no attribute to set"))),
            },
            Target::Tuple(targets) => {
                let items = value.items(self.budget)?;
                if items.len() != targets.len() {
                    let [wanted, found] = [targets.len(), items.len()];
                    return Err(Fault::refused(format!("{wanted} names are set from a list of {found}")));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item)?;
                }
            }
        }
        Ok(())
    }

    fn loop_over(&mut self, code: &Arc<For>) -> Fallible<Flow> {
        let items = self.value(&code.items)?;
        // Only what the loop is around says at which level it is, so a loop begins at the first.
        self.run_loop(code, &items, 0)
    }

    /// Runs a loop; a `break` ends it and nothing more.
    fn run_loop(&mut self, code: &Arc<For>, items: &Value, level: usize) -> Fallible<Flow> {
        let items = self.loop_items_of(code, items)?;
        let scope = self.scope_id();
        let state = Rc::new(LoopState {
            items,
            index: Cell::new(0),
            level,
            changed: RefCell::new(None),
            code: code.clone(),
            scope,
        });
        let ran = self.iterate(&state);
        // The last arguments of `loop.changed` may refer to this loop: a cycle of references would never be freed.
        state.changed.replace(None);
        if ran? == 0 { self.scoped(self.current, |renderer| renderer.body(&code.otherwise)) } else { Ok(Flow::Next) }
    }

    /// The items of a loop, without those that its condition leaves out if it counts them.
    fn loop_items_of(&mut self, code: &For, items: &Value) -> Fallible<Rc<Items>> {
        let Some(condition) = code.condition.as_ref().filter(|_| code.names_loop) else {
            return match items {
                Value::List(items) | Value::Tuple(items) | Value::View(_, items) => Ok(items.clone()),
                other => Ok(Rc::new(Items::new(other.items(self.budget)?, self.budget)?)),
            };
        };
        let mut kept = Vec::new();
        for item in items.items(self.budget)? {
            if self.is_kept(code, condition, &item)? {
                kept.push(item);
            }
        }
        Ok(Rc::new(Items::new(kept, self.budget)?))
    }

    /// The number of items that the loop ran for.
    fn iterate(&mut self, state: &Rc<LoopState>) -> Fallible<usize> {
        let code = state.code.clone();
        let mut count = 0;
        for (index, item) in state.items.items.iter().enumerate() {
            // Without `loop` nothing counts the items, and a condition may depend on the body.
            if let Some(condition) = code.condition.as_ref().filter(|_| !code.names_loop)
                && !self.is_kept(&code, condition, item)?
            {
                continue;
            }
            state.index.set(index);
            count += 1;
            self.loop_items.push(item.clone());
            let flow = self.scoped(self.current, |renderer| {
                renderer.set("loop", Value::Loop(state.clone()));
                renderer.assign(&code.target, item.clone())?;
                renderer.body(&code.body)
            });
            self.loop_items.pop();
            if flow? == Flow::Break {
                break;
            }
        }
        Ok(count)
    }

    fn is_kept(&mut self, code: &For, condition: &Expr, item: &Value) -> Fallible<bool> {
        self.scoped(self.current, |renderer| {
            renderer.assign(&code.target, item.clone())?;
            Ok(renderer.value(condition)?.is_true())
        })
    }

    /// The text of a recursive loop over these items.
    pub(super) fn call_loop(&mut self, state: &LoopState, items: &Value) -> Fallible<Value> {
        if !state.code.is_recursive {
            return Err(Fault::refused("loop is called, and its loop is not recursive"));
        }
        let place = self.scope_of(state.scope)?;
        let text = self.captured(|renderer| {
            let before = std::mem::replace(&mut renderer.current, place);
            let end = renderer.deeper(|renderer| renderer.run_loop(&state.code, items, state.level + 1));
            renderer.current = before;
            end.map(|_| ())
        })?;
        Ok(Value::Text(Rc::new(text)))
    }

    fn bound(&self, code: &Arc<Macro>) -> Value {
        Value::Macro(Rc::new(BoundMacro { code: code.clone(), scope: self.scope_id() }))
    }

    /// The text that a macro writes.
    pub(super) fn call_macro(&mut self, found: &BoundMacro, given: Given) -> Fallible<Value> {
        let place = self.scope_of(found.scope)?;
        let code = &found.code;
        let text = self.captured(|renderer| {
            renderer.scoped(place, |renderer| {
                renderer.set_params(code, given)?;
                renderer.body(&code.body).map(|_| ())
            })
        })?;
        Ok(Value::Text(Rc::new(text)))
    }

    /// Sets a macro's parameters, and `caller`, `varargs` and `kwargs`, in the current scope. A default sees the
    /// parameters before it, and a parameter without a value is undefined.
    fn set_params(&mut self, code: &Macro, given: Given) -> Fallible<()> {
        let Given { args, mut named } = given;
        let mut args = args.into_iter();
        for (name, default) in &code.params {
            let by_name = named.iter().position(|(found, _)| found == name).map(|at| named.remove(at).1);
            let value = match (args.next(), by_name, default) {
                (Some(_), Some(_), _) => {
                    return Err(Fault::refused(format!("{} is given its {name} twice", code.name)));
                }
                (Some(value), None, _) | (None, Some(value), _) => value,
                (None, None, Some(default)) => self.value(default)?,
                (None, None, None) => Value::undefined(format!("the parameter {name} of {} is not given", code.name)),
            };
            self.set(name, value);
        }
        let caller = named.iter().position(|(found, _)| found == "caller").map(|at| named.remove(at).1);
        self.set("caller", caller.unwrap_or_else(|| Value::undefined("caller is not defined".to_owned())));
        let rest = args.collect::<Vec<_>>();
        if !rest.is_empty() && !code.names_varargs {
            return Err(Fault::refused(format!("{} takes {} arguments", code.name, code.params.len())));
        }
        if let Some((name, _)) = named.first().filter(|_| !code.names_kwargs) {
            return Err(Fault::refused(format!("{} takes no argument {name}", code.name)));
        }
        let named = named.into_iter().map(|(name, value)| Ok((Value::text(&name, self.budget)?, value)));
        let named = named.collect::<Fallible<_>>()?;
        self.set("varargs", Value::tuple(rest, self.budget)?);
        self.set("kwargs", Value::dict(named, self.budget)?);
        Ok(())
    }
}

/// Appends a text with its marks.
pub(super) fn append(out: &mut Text, text: &str, marks: &[Mark]) {
    let start = out.text.len();
    out.text.push_str(text);
    out.marks.extend(marks.iter().map(|mark| {
        let bytes = mark.bytes.start + start..mark.bytes.end + start;
        Mark { bytes, ..mark.clone() }
    }));
}

/// Sets or adds an attribute of a namespace; a name that begins with `_` is refused.
fn set_attribute(namespace: &Namespace, name: &str, value: Value) -> Fallible<()> {
    if name.starts_with('_') {
        return Err(Fault::refused(format!("a namespace has no attribute {name}")));
    }
    let mut values = namespace.borrow_mut();
    match values.iter_mut().find(|(found, _)| found == name) {
        Some((_, found)) => *found = value,
        None => values.push((name.to_owned(), value)),
    }
    Ok(())
}
