// The theme's search takes a dash for "without this word", or for a blank. In an option, "--host-memory", it is neither.
const QUERY = 2; // the theme's SearchMessageType.QUERY
const option = /(^|\s)-+(\w[\w-]*)/g;
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (message?.type === QUERY) {
    // the theme removes an escape twice: when it divides the query into words, and when it asks for them
    const data = message.data.replace(option, (_, blank, name) => blank + name.replaceAll("-", "\\\\\\-"));
    message = { ...message, data };
  }
  return post.call(this, message, ...rest);
};
