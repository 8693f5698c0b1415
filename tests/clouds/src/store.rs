//! Stores a cloud's objects by name. A list can lag behind the changes, while a call by name sees them at once.

use std::collections::BTreeMap;
use std::time::Duration;

/// Object with the times of its creation and deletion.
#[derive(Debug, Clone)]
pub struct Stored<T> {
    /// The object.
    pub object: T,
    /// Time of its creation.
    pub made: Duration,
    /// Time at which it was gone.
    gone: Option<Duration>,
}

/// Objects of one kind.
#[derive(Debug, Clone)]
pub struct Store<T>(BTreeMap<String, Stored<T>>);

impl<T> Default for Store<T> {
    fn default() -> Store<T> {
        Store(BTreeMap::new())
    }
}

/// Time for which a list may still show a deleted resource.
const REMEMBERED: Duration = Duration::from_secs(600);

impl<T> Store<T> {
    /// Adds an object; one that was gone is replaced.
    pub fn add(&mut self, name: &str, object: T, now: Duration) {
        self.0.retain(|_, one| one.gone.is_none_or(|gone| gone + REMEMBERED > now));
        self.0.insert(name.to_owned(), Stored { object, made: now, gone: None });
    }

    /// Returns the object of this name.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.0.get(name).filter(|one| one.gone.is_none()).map(|one| &one.object)
    }

    /// Returns the object of this name.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut T> {
        self.0.get_mut(name).filter(|one| one.gone.is_none()).map(|one| &mut one.object)
    }

    /// Removes the object of this name; false when there is none.
    pub fn remove(&mut self, name: &str, now: Duration) -> bool {
        let found = self.0.get_mut(name).filter(|one| one.gone.is_none());
        found.map(|one| one.gone = Some(now)).is_some()
    }

    /// Removes the objects of these names.
    pub fn remove_all(&mut self, names: &[String], now: Duration) {
        for name in names {
            self.remove(name, now);
        }
    }

    /// Returns all objects that exist, by name.
    pub fn all(&self) -> impl Iterator<Item = (&str, &T)> {
        self.0.iter().filter(|(_, one)| one.gone.is_none()).map(|(name, one)| (name.as_str(), &one.object))
    }

    /// Returns all objects that exist, by name.
    pub fn all_mut(&mut self) -> impl Iterator<Item = (&str, &mut T)> {
        let existing = self.0.iter_mut().filter(|(_, one)| one.gone.is_none());
        existing.map(|(name, one)| (name.as_str(), &mut one.object))
    }

    /// Returns the objects of a list that misses the changes of the last `lag`.
    pub fn listed(&self, now: Duration, lag: Duration) -> impl Iterator<Item = (&str, &T)> {
        let seen = move |one: &Stored<T>| {
            one.made + lag <= now && one.gone.is_none_or(|gone| !lag.is_zero() && gone + lag > now)
        };
        self.0.iter().filter(move |(_, one)| seen(one)).map(|(name, one)| (name.as_str(), &one.object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_list_misses_what_is_new_and_shows_what_is_gone() {
        let at = Duration::from_secs;
        let mut store = Store::default();
        store.add("old", 1, at(0));
        store.add("new", 2, at(10));
        assert!(store.remove("old", at(10)) && !store.remove("old", at(10)));
        let names = |lag| store.listed(at(11), at(lag)).map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(0), ["new"]);
        assert_eq!(names(5), ["old"]);
        assert_eq!(store.get("new"), Some(&2));
        assert_eq!(store.get("old"), None);
    }
}
