// An error message is searched by its words, in texts: titles would count a thousand times as much, and quotes and colons have
// another meaning there. A word with a weight is itself; without, it stands for all words that begin with it.
const isMessage = (text) => text.trim().split(/\s+/).length > 3 && /[:;,"'`(=]/.test(text);
const words = (text) => text.replace(/[^\p{L}\p{N}_\s]/gu, " ").split(/\s+/).filter((word) => word.length > 2 && !/^\d+$/.test(word));
const query = (text) => (isMessage(text) ? [...new Set(words(text))].map((word) => `text:${word}^1`).join(" ") : text);
const asked = (message) => (typeof message.data === "string" ? { ...message, data: query(message.data) } : message);
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message) { post.call(this, asked(message)); };

// Browsers start no worker from a file. There the worker of the search runs in a hidden frame, so that the site needs no server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      const load = (source) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: source, async: false, onload: done, onerror: failed });
        inside.document.documentElement.append(script);
      });
      inside.importScripts = (...sources) => Promise.all(sources.map(load));
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: asked(data) })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
