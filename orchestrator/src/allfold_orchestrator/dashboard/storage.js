// The browser's storage; where it allows none, as some do for privacy, the page's own memory.

export class SafeStorage {
  /** @param open returns localStorage or sessionStorage, or throws */
  constructor(open) {
    this.memory = new Map();
    try {
      this.kept = open();
    } catch {
      this.kept = null;
    }
  }

  get(key) {
    return (this.kept ? this.kept.getItem(key) : this.memory.get(key)) ?? null;
  }

  set(key, value) {
    if (this.kept) this.kept.setItem(key, value);
    else this.memory.set(key, value);
  }

  remove(key) {
    if (this.kept) this.kept.removeItem(key);
    else this.memory.delete(key);
  }
}
