// Search from files. A browser starts no worker for a page that was opened as a file, so the script
// of the search runs in an empty frame there. On a server this file changes nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      // What the script posts arrives here; what is posted to it arrives there, once it is loaded.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      const loaded = new Promise((done, failed) => {
        script.onload = done;
        script.onerror = failed;
      });
      this.postMessage = (data) =>
        loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
      script.src = address;
      frame.contentDocument.body.append(script);
    }
  };
}
